"""What is kept of one request: raw times, from which every figure can be computed again."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(kw_only=True)
class RequestRow:
    """One request. Times are seconds since the load began, on the client's monotonic clock.

    `arrivals` are the times at which bytes with new tokens came, `counts` how many tokens each brought; both are empty
    if the server names neither token ids nor a running count. `first_s` is the first arrival of any output.
    """

    index: int
    start_s: float
    first_s: float | None = None
    end_s: float | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    arrivals: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] | None = None
    text: str = ""
    logprobs: list[float | None] | None = None
    finish_reason: str | None = None
    input_sha256: str = ""
    retries: int = 0
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the answer came to its end."""
        return self.error is None

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first output."""
        return None if self.first_s is None else self.first_s - self.start_s

    @property
    def e2el_s(self) -> float | None:
        """From sending to the end of the answer."""
        return None if self.end_s is None else self.end_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Time of each token after the first."""
        if self.e2el_s is None or self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gap before each token after the first arrival; tokens that came together share theirs."""
        gaps: list[float] = []
        for before, now, count in zip(self.arrivals, self.arrivals[1:], self.counts[1:], strict=False):
            gaps += [(now - before) / count] * count
        return gaps

    def to_json(self) -> dict[str, Any]:
        """A row; times to the microsecond."""
        row = asdict(self)
        for name in ("start_s", "first_s", "end_s"):
            row[name] = None if row[name] is None else round(row[name], 6)
        row["arrivals"] = [round(time, 6) for time in self.arrivals]
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "RequestRow":
        """From a row; keys that it does not know are left out."""
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in row.items() if name in known})
