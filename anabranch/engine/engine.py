"""Continuous batching: each step computes one token of every running answer and a chunk of waiting prompts."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence

from anabranch.engine.cache import PAGE, CachePools
from anabranch.engine.flight import Flight, Result
from anabranch.engine.limits import Limits
from anabranch.engine.request import Request
from anabranch.engine.runner import Runner
from anabranch.engine.sampler import Sampled, needs_history
from anabranch.engine.scheduler import Scheduler, Segment


class Engine:
    """Requests in, tokens out.

    Args:
        runner: model and cache.
        eos_ids: ids that end an answer.
        max_context: longest prompt plus answer.
        prefill_chunk: most prompt tokens computed in one step.
        prefix_cache: reuse what earlier requests computed.
        cache: what the scheduler changes instead of the runner's cache.
        ahead: launch the next step before the samples of the last are read, so that the device never waits for the
            host. A token is then told while its successor is being computed; what an end token was found to follow
            is thrown away.
    """

    def __init__(
        self,
        runner: Runner,
        eos_ids: Iterable[int],
        max_context: int,
        prefill_chunk: int,
        prefix_cache: bool = True,
        cache: CachePools | None = None,
        ahead: bool = False,
    ) -> None:
        self.ahead = ahead
        self._flight: Flight | None = None
        self.runner, self.eos_ids = runner, frozenset(eos_ids)
        self.limits = Limits(vocab=runner.vocab, context=max_context, cache=runner.cache.pages * PAGE)
        self.scheduler = Scheduler(cache or runner.cache, prefill_chunk, prefix_cache, runner.saves)
        self.finished: Counter[str] = Counter()
        self.prompt_tokens = self.generation_tokens = self.nonfinite = 0

    @property
    def replicas(self) -> Sequence["Engine"]:
        """The engines of all attention replicas."""
        return [self]

    def check(self, request: Request) -> None:
        """Raise ValueError if the prompt is empty, or prompt plus answer can never fit."""
        self.limits.check_length(len(request.prompt), request.params)

    def add(self, request: Request) -> None:
        """Queue a request; ValueError as in `check`."""
        self.check(request)
        request.eos_ids = self.eos_ids
        self.scheduler.waiting.append(request)

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> list[Request]:
        """Read the results of the batch in flight, or of a new one; the requests that got a token or ended."""
        flight, self._flight = self._flight, None
        if flight is None or not flight.wanted:
            flight = self._launch(None)
        if flight is None:
            return []
        if self.ahead:
            self._flight = self._launch(flight)
        return self._land(flight)

    def _launch(self, behind: Flight | None) -> Flight | None:
        """The next step, started; None if there is nothing to compute before `behind` has landed."""
        segments = self.scheduler.schedule(ahead=behind is not None)
        if not segments or (behind is not None and waits_for_history(segments)):
            return None
        self.scheduler.reserve(segments)
        flight = self.runner.launch(segments, behind)
        for request, count in segments:
            self.scheduler.launched(request, count)
            flight.depths.append(request.computed)
        flight.seal(self.runner.device)
        return flight

    def _land(self, flight: Flight) -> list[Request]:
        results = flight.wait()
        for i in flight.ready:
            flight.segments[i][0].flying -= 1
        landed = zip(flight.segments, flight.depths, results, strict=True)
        # a request may have ended since, by a token that came before or by abort
        return [
            request
            for (request, _), depth, result in landed
            if request.finish_reason is None and self._take(request, depth, result)
        ]

    def flush(self) -> bool:
        """Forget cached prefixes; False if there is no prefix cache."""
        caches = [engine.scheduler.prefix for engine in self.replicas]
        for cache in caches:
            if cache is not None:
                cache.flush()
        return None not in caches

    def abort(self, request: Request) -> None:
        """Drop a request and free what it holds."""
        if request.finish_reason is None:
            self._finish(request, "abort")

    def _take(self, request: Request, depth: int, result: Result) -> bool:
        """Record one request's result; whether it is news to the outside."""
        if not result.finite:
            self.nonfinite += 1
            request.error = "the model produced a non-finite number for this request"
            self._finish(request, "error", poisoned=True)
            return True
        request.prompt_logprobs += result.prompt_logprobs
        self.scheduler.landed(request, depth)
        if result.sampled is not None:
            self._append(request, result.sampled)
        return result.sampled is not None

    def _append(self, request: Request, sampled: Sampled) -> None:
        if request.first_token is None:
            request.first_token = time.perf_counter()
            self.prompt_tokens += len(request.prompt)
        token, params = sampled.token, request.params
        if not params.max_tokens:  # only the prompt's log probabilities were asked for
            self._finish(request, "length")
            return
        self.generation_tokens += 1
        request.sampled.append(sampled)
        if token in params.stop_token_ids or (token in self.eos_ids and not params.ignore_eos):
            self._finish(request, "stop")
            return
        request.text.push(token)
        if request.text.stopped:
            self._finish(request, "stop")
        elif len(request.sampled) >= params.max_tokens:
            self._finish(request, "length")

    def _finish(self, request: Request, reason: str, poisoned: bool = False) -> None:
        request.text.finish()
        request.finish_reason, request.finished = reason, time.perf_counter()
        self.finished[reason] += 1
        self.scheduler.release(request, poisoned)


def waits_for_history(segments: Iterable[Segment]) -> bool:
    """Whether someone's next choice looks at a token that is still on its way."""
    return any(request.flying and needs_history(request) for request, _ in segments)
