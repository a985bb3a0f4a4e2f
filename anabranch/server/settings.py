"""What an operator may set about the server; the engine has its own options."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARSERS = ("kimi", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """Defaults are those of `anabranch serve`.

    Attributes:
        api_key: asked for as a Bearer token on every route but /health and /metrics; None asks for none.
        served_model_name: the name in `model` fields; None takes the checkpoint directory's.
        parser: "kimi" cuts chat answers into reasoning, content and tool calls; "none" leaves them as text.
        max_body_bytes: longest request body.
        body_timeout_s: seconds that a request body may take to arrive.
        max_queue: answers that may wait beyond those that the engine computes at once.
        request_timeout_s: seconds that an answer may take; None is no limit.
        drain_s: seconds that running answers get to finish when the server is told to stop.
        profile_dir: where /start_profile writes its traces; None refuses to profile.

    Raises:
        ValueError: a value is out of range; the message names it and what is accepted.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    served_model_name: str | None = None
    parser: str = "kimi"
    max_body_bytes: int = 32 * 1024 * 1024
    body_timeout_s: float = 30.0
    max_queue: int = 256
    request_timeout_s: float | None = None
    drain_s: float = 30.0
    profile_dir: Path | None = None

    def __post_init__(self) -> None:
        checks = (
            ("port", 0 <= self.port <= 65535, "0..65535 (0 takes a free one)"),
            ("api_key", self.api_key is None or (self.api_key.isascii() and bool(self.api_key)), "ASCII, not empty"),
            ("served_model_name", self.served_model_name != "", "a name"),
            ("parser", self.parser in PARSERS, f"one of {', '.join(PARSERS)}"),
            ("max_body_bytes", self.max_body_bytes >= 1, "at least 1"),
            ("body_timeout_s", self.body_timeout_s > 0, "a positive number"),
            ("max_queue", self.max_queue >= 0, "0 or more"),
            ("request_timeout_s", self.request_timeout_s is None or self.request_timeout_s > 0, "a positive number"),
            ("drain_s", self.drain_s >= 0, "0 or more"),
        )
        for name, ok, accepted in checks:
            if not ok:
                shown = "" if name == "api_key" else f"={getattr(self, name)!r}"
                raise ValueError(f"{name}{shown}: need {accepted}")

    def public(self) -> dict[str, Any]:
        """Everything but the key, as JSON values."""
        names = [name for name in self.__slots__ if name != "api_key"]
        values = {name: getattr(self, name) for name in names}
        return values | {"profile_dir": self.profile_dir and str(self.profile_dir), "api_key_set": bool(self.api_key)}
