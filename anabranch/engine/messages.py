"""What an engine and its server tell each other: plain values, so that the server's process needs no torch.

To the engine:    ("submit", number, prompt, params, skip_special, arrived)   ("abort", number)
                  ("call", number, name, args)   ("stop",)
From the engine:  ("news", [(number, fields of an Update)], stats)   ("result", number, value, error)
                  ("failed", reason)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from anabranch.engine.limits import Limits


class Update(NamedTuple):
    """What became known about an answer since the last update.

    `prompt_logprobs` come once, when asked for; `queue_s`, the seconds from arrival to the first step, comes once too.
    """

    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    top_logprobs: Sequence[dict[int, float]] = ()
    finish_reason: str | None = None
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_logprobs: Sequence[tuple[float | None, dict[int, float]]] | None = None
    queue_s: float | None = None


class QueueFull(Exception):  # noqa: N818  (as queue.Full)
    """No request is accepted now."""


class EngineFailed(Exception):  # noqa: N818  (what happened, as QueueFull)
    """The engine has ended without being told to."""


class RankFailed(EngineFailed):
    """A rank of a job has ended, hangs, or said why it cannot go on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What does not change while an engine runs.

    Attributes:
        vocab_size: rows of the model's table; `limits.vocab` of them have a token.
        fusions: layer kind -> the chosen projection path, and why it was chosen.
        memory: the memory plan in one line.
        document: the choices with their reasons, configuration and bytes, as JSON values.
        stats: counts and levels before the first step.
    """

    path: Path
    architecture: str
    limits: Limits
    vocab_size: int
    fusions: Mapping[str, tuple[str, str]]
    memory: str
    document: Mapping[str, Any]
    stats: Mapping[str, Any]
