"""How a request's tokens are chosen."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Names and defaults as in vLLM: temperature 0 is greedy, top_k 0 or -1 keeps all, logprobs None reports none.

    Raises:
        ValueError: a value is out of range; the message names it and what is accepted.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        checks = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 (greedy) or a positive number"),
            ("top_p", 0 < self.top_p <= 1, "0 < top_p <= 1"),
            ("top_k", self.top_k >= -1, "0 or -1 (all), or a positive number"),
            ("min_p", 0 <= self.min_p <= 1, "0 <= min_p <= 1"),
            ("stop", all(self.stop), "non-empty strings"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "0 <= min_tokens <= max_tokens"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "None or 0..20"),
        )
        for name, ok, accepted in checks:
            if not ok:
                raise ValueError(f"{name}={getattr(self, name)!r}: need {accepted}")
