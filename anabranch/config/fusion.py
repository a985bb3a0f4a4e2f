"""Which projection path each layer kind takes."""

from dataclasses import dataclass, fields

KDA_PATHS = ("separate", "split", "whole", "overlap", "fused", "deferred", "single")
MLA_PATHS = ("separate", "merged", "overlap", "single")


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionConfig:
    """Path per layer kind: a name, or `auto` (the plan chooses and says why).

    An explicit name that the rules refuse is a ValueError when the model is built, never a silent fallback. `table` is
    a file of measured times for `auto` to choose by; None takes those that ship with the package.
    """

    kda: str = "auto"
    mla: str = "auto"
    table: str | None = None

    def __post_init__(self) -> None:
        for kind, legal in (("kda", KDA_PATHS), ("mla", MLA_PATHS)):
            value = getattr(self, kind)
            if value not in ("auto", *legal):
                raise ValueError(f"fusion {kind}={value!r} is unknown; accepted: auto, {', '.join(legal)}")

    @classmethod
    def parse(cls, items: list[str]) -> "FusionConfig":
        """From repeated `KIND=PATH` options, e.g. ["kda=split", "mla=merged"], and `table=FILE`."""
        known = [f.name for f in fields(cls)]
        values: dict[str, str] = {}
        for item in items:
            kind, _, path = item.partition("=")
            if kind not in known or not path:
                raise ValueError(f"fusion option {item!r} is not KIND=PATH with KIND one of kda, mla, nor table=FILE")
            values[kind] = path
        return cls(**values)
