"""One engine over many ranks: the head schedules every attention replica, and all ranks compute each step together."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from anabranch.engine.cache import Cache
from anabranch.engine.engine import Engine, waits_for_history
from anabranch.engine.fleet import Fleet
from anabranch.engine.flight import Flight, Result
from anabranch.engine.orders import Change, Scribe, Segment
from anabranch.engine.request import Request
from anabranch.engine.runner import Runner


class ReplicaCache:
    """What a scheduler needs of its replica's cache: numbers, and changes that all its ranks are told of in order.

    Args:
        like: a rank's cache; all have the same numbers.
        local: this rank's cache, if it belongs to the replica.
    """

    def __init__(self, like: Cache, local: Cache | None, scribe: Scribe) -> None:
        self.slots, self.snapshots, self.pages = like.slots, like.snapshots, like.pages
        self._local, self._scribe = local, scribe
        # slots whose values are looked at, and where the answer of all ranks goes
        self.asked: list[tuple[int, torch.Tensor]] = []

    def clear(self, slot: int, pages: Iterable[int] = ()) -> None:
        index = list(pages)
        self._scribe.changes.append(Change("clear", slot, index))
        if self._local is not None:
            self._local.clear(slot, index)

    def copy(self, source: int, target: int) -> None:
        self._scribe.changes.append(Change("copy", source, target))
        if self._local is not None:
            self._local.copy(source, target)

    def finite(self, slot: int) -> torch.Tensor:
        """As of one rank's cache; the answer is there when the step before it has landed."""
        answer = torch.ones((), dtype=torch.bool) if self._local is None else self._local.finite(slot)
        self.asked.append((slot, answer))
        return answer


@dataclass(slots=True)
class _Step:
    """A step under way: this rank's part, and for each replica its segments, their depths, and what was asked."""

    local: Flight
    segments: list[list[Segment]]
    depths: list[list[int]] = field(default_factory=list)
    asked: list[list[torch.Tensor]] = field(default_factory=list)


class JointEngine(Engine):
    """The engine of a job with several ranks; it is itself the engine of attention replica 0.

    Steps begin on all ranks in the same order. With pipeline stages as many steps are under way as there are stages:
    running answers are spread over them, and a prompt's next chunk follows at once.

    Args:
        ahead: the order for a step goes out while the one before it is computed. On one stage it continues from samples
            that stay on the devices (`follow`). With stages it is a step of other requests, as the first stage learns
            tokens from the head; a rank has it launched before it reads the last one.
    """

    def __init__(
        self,
        runner: Runner,
        fleet: Fleet,
        eos_ids: Iterable[int],
        max_context: int,
        prefill_chunk: int,
        prefix_cache: bool = True,
        ahead: bool = False,
    ) -> None:
        stages = fleet.layout.pp
        self.fleet, self.follow = fleet, ahead and stages == 1
        self.depth = stages + self.follow
        self._kept = self.depth - 1 if ahead else 0  # steps that a rank leaves unread behind an order
        options = (eos_ids, max_context, prefill_chunk, prefix_cache)
        self._scribes = [Scribe() for _ in range(fleet.layout.dp_attention)]
        self._caches = [
            ReplicaCache(runner.cache, None if i else runner.cache, scribe) for i, scribe in enumerate(self._scribes)
        ]
        super().__init__(runner, *options, cache=self._caches[0], ahead=ahead)
        self._others = [Engine(runner, *options, cache=cache) for cache in self._caches[1:]]
        for engine in self.replicas:
            engine.scheduler.depth = stages
        self._steps: deque[_Step] = deque()
        self._home: dict[Request, Engine] = {}

    @property
    def replicas(self) -> Sequence[Engine]:
        return [self, *self._others]

    def add(self, request: Request) -> None:
        """Queue a request at the replica with the least to do; ValueError as in `check`."""
        home = min(self.replicas, key=_load)
        Engine.add(home, request)
        if home is not self:
            self._home[request] = home

    @property
    def busy(self) -> bool:
        return bool(self._steps) or any(e.scheduler.waiting or e.scheduler.running for e in self.replicas)

    def step(self) -> list[Request]:
        """Begin steps until enough are under way, and end the oldest; the requests that got a token or ended."""
        self.fleet.hub.busy(True)
        try:
            while len(self._steps) < self.depth and self._begin():
                pass
            progressed = self._end() if self._steps else []
        except (RuntimeError, OSError, EOFError) as error:
            raise self.fleet.hub.explain(error) from error
        self.fleet.hub.busy(False)
        return progressed

    def drain(self) -> None:
        """End the steps that are under way, and begin none."""
        while self._steps:
            self._end()

    def abort(self, request: Request) -> None:
        """Drop a request and free what it holds; a step under way computes it in vain."""
        Engine.abort(self._home.pop(request, self), request)

    def _begin(self) -> bool:
        segments = [self._schedule(dp_rank, engine) for dp_rank, engine in enumerate(self.replicas)]
        if not any(segments) or any(map(waits_for_history, segments)):
            return False
        for engine, part in zip(self.replicas, segments, strict=True):
            engine.scheduler.reserve(part)
        turn = self.runner.turn(segments, self.follow)
        for dp_rank, (scribe, part) in enumerate(zip(self._scribes, segments, strict=True)):
            self.fleet.tell(dp_rank, ("step", scribe.step(part, turn), self._kept))
        behind = self._steps[-1].local if self.follow and self._steps else None
        step = _Step(self.runner.launch(segments[0], behind, turn), segments)
        for engine, part in zip(self.replicas, segments, strict=True):
            step.depths.append([self._launched(engine, request, count) for request, count in part])
        step.asked = [self._ask(dp_rank) for dp_rank in range(len(segments))]
        step.local.seal(self.runner.device)
        self._steps.append(step)
        return True

    def _schedule(self, dp_rank: int, engine: Engine) -> list[Segment]:
        # a replica without a step under way may preempt, whatever the others do
        return engine.scheduler.schedule(ahead=any(step.segments[dp_rank] for step in self._steps))

    def _launched(self, engine: Engine, request: Request, count: int) -> int:
        """A request whose prompt goes on may be scheduled again before the result.

        So may one that gets a token, if the ranks follow it; otherwise it waits.
        """
        engine.scheduler.launched(request, count)
        if request.computed >= request.prefill_until:
            if not self.follow:
                engine.scheduler.away.add(request)
            elif engine is not self:  # the runner counts those of this rank's replica
                request.flying += 1
        return request.computed

    def _ask(self, dp_rank: int) -> list[torch.Tensor]:
        """Have the other ranks look at the slots in question now, before a later step changes them."""
        cache, scribe = self._caches[dp_rank], self._scribes[dp_rank]
        asked, cache.asked = cache.asked, []
        if asked:
            changes, scribe.changes = scribe.changes, []
            self.fleet.tell(dp_rank, ("look", changes, [slot for slot, _ in asked]))
        return [answer for _, answer in asked]

    def _end(self) -> list[Request]:
        """Read the oldest step; the requests that got a token or ended."""
        if self._kept and len(self._steps) < self.depth:
            self.fleet.land()
        step = self._steps.popleft()
        local, progressed = step.local.wait(), []
        for i in step.local.ready:
            step.local.segments[i][0].flying -= 1
        for dp_rank, engine in enumerate(self.replicas):
            results = self._results(step, dp_rank, local)
            for (request, _), depth, result in zip(step.segments[dp_rank], step.depths[dp_rank], results, strict=True):
                if depth >= request.prefill_until:
                    engine.scheduler.away.discard(request)
                    request.flying -= self.follow and engine is not self
                if request.finish_reason is None and engine._take(request, depth, result):
                    progressed.append(request)
                if request.finish_reason is not None:
                    self._home.pop(request, None)
        return progressed

    def _results(self, step: _Step, dp_rank: int, local: list[Result]) -> list[Result]:
        """What the rank that samples for a replica found, once the ranks have said what they were asked."""
        sampler = self.fleet.layout.sampler(dp_rank)
        if sampler and step.segments[dp_rank]:
            local = self.fleet.hub.receive(sampler, "results")
        if asked := step.asked[dp_rank]:
            for rank in self.fleet.members(dp_rank):
                for answer, finite in zip(asked, self.fleet.hub.receive(rank, "finite"), strict=True):
                    answer &= finite
        return local if sampler == 0 or step.segments[dp_rank] else []


def _load(engine: Engine) -> tuple[bool, int]:
    """Free slots first, then the fewest tokens to come: those of prompts, and the most that answers may have."""
    scheduler = engine.scheduler
    requests = [*scheduler.running, *scheduler.waiting]
    full = len(requests) >= scheduler.cache.slots
    return full, sum(r.known - r.computed + r.params.max_tokens - len(r.sampled) for r in requests)
