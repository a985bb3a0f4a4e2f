"""The answer to "may this be done?": every refusal carries its reason."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """`ok`, and one line why or why not."""

    ok: bool
    reason: str
