"""What the head tells a rank about requests: all of a request once, then only what changed, as plain values.

The head's `Scribe` writes it down for one attention replica; on every rank of that replica `Shadows` keep requests
that look to a `Runner` like the head's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from anabranch.engine.request import Request
from anabranch.engine.sampler import Sampled
from anabranch.engine.sampling import SamplingParams
from anabranch.engine.text import TextStream

Segment = tuple[Request, int]


class Opening(NamedTuple):
    """A request that the rank has not heard of."""

    number: int
    prompt: list[int]
    params: SamplingParams
    eos_ids: frozenset[int]


class Part(NamedTuple):
    """One request's share of a step. Pages from index `first_page` on, and tokens, are new since the last time.

    `flying`: tokens of steps before this one that the head has not read yet. `saving` as in `Request`.
    """

    number: int
    length: int
    computed: int
    prefill_until: int
    slot: int
    flying: int
    saving: tuple[int, int] | None
    first_page: int
    pages: list[int]
    tokens: list[int]


class Change(NamedTuple):
    """What the scheduler did to the cache since the last order: ("clear", slot, pages) or ("copy", source, target)."""

    what: str
    slot: int
    other: Any


class StepOrder(NamedTuple):
    """One step of one replica."""

    changes: Sequence[Change]
    opened: Sequence[Opening]
    closed: Sequence[int]
    parts: Sequence[Part]
    turn: Any


@dataclass(slots=True)
class _Known:
    number: int
    pages: list[int] = field(default_factory=list)
    tokens: int = 0


class Scribe:
    """Writes the orders of one replica; every rank of it must get all of them, in order.

    Attributes:
        changes: of the cache, since the last order that carried them.
    """

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._known: dict[Request, _Known] = {}
        self._numbers = count()

    def step(self, segments: Sequence[Segment], turn: Any) -> StepOrder:
        """The order for a step over these segments, with everything that happened since the last one."""
        closed = [r for r in self._known if r.finish_reason is not None]
        numbers = [self._known.pop(r).number for r in closed]
        opened = []
        for request, _ in segments:
            if request not in self._known:
                known = self._known[request] = _Known(next(self._numbers))
                opened.append(Opening(known.number, request.prompt, request.params, request.eos_ids))
        changes, self.changes = self.changes, []
        return StepOrder(changes, opened, numbers, [self._part(r, n) for r, n in segments], turn)

    def _part(self, r: Request, n: int) -> Part:
        known = self._known[r]
        same = len(known.pages)
        if r.pages[:same] != known.pages:  # preempted, or given another request's equal page
            pairs = list(zip(r.pages, known.pages, strict=False))
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        new = r.pages[same:]
        known.pages[same:] = new
        tokens = [s.token for s in r.sampled[known.tokens :]]
        known.tokens += len(tokens)
        return Part(known.number, n, r.computed, r.prefill_until, r.slot, r.flying, r.saving, same, new, tokens)


class Shadows:
    """The requests of one replica on one of its ranks."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}

    def obey(self, order: StepOrder) -> list[Segment]:
        """Bring all requests up to date; the segments of the step."""
        for number in order.closed:
            del self._requests[number]
        for opening in order.opened:
            request = Request(opening.number, opening.prompt, opening.params, TextStream(None, ()), opening.eos_ids)
            self._requests[opening.number] = request
        return [self._segment(part) for part in order.parts]

    def _segment(self, part: Part) -> Segment:
        r = self._requests[part.number]
        r.computed, r.prefill_until, r.slot, r.flying = part.computed, part.prefill_until, part.slot, part.flying
        r.saving, r.pages[part.first_page :] = part.saving, part.pages
        # their log probabilities are the head's business
        r.sampled += [Sampled(token, 0.0) for token in part.tokens]
        return r, part.length
