"""Continuous batching: each step computes one token of every running answer and a chunk of waiting prompts."""

import time
from collections import Counter
from collections.abc import Iterable

from anabranch.engine.cache import PAGE
from anabranch.engine.limits import Limits
from anabranch.engine.request import Request
from anabranch.engine.runner import Result, Runner
from anabranch.engine.sampler import Sampled
from anabranch.engine.scheduler import Scheduler


class Engine:
    """Requests in, tokens out.

    Args:
        runner: model and cache.
        eos_ids: ids that end an answer.
        max_context: longest prompt plus answer.
        prefill_chunk: most prompt tokens computed in one step.
        prefix_cache: reuse what earlier requests computed.
    """

    def __init__(
        self,
        runner: Runner,
        eos_ids: Iterable[int],
        max_context: int,
        prefill_chunk: int,
        prefix_cache: bool = True,
    ) -> None:
        self.runner, self.eos_ids = runner, frozenset(eos_ids)
        self.limits = Limits(vocab=runner.vocab, context=max_context, cache=runner.cache.pages * PAGE)
        self.scheduler = Scheduler(runner.cache, prefill_chunk, prefix_cache)
        self.finished: Counter[str] = Counter()
        self.prompt_tokens = self.generation_tokens = self.nonfinite = 0

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
        """Run one batch; returns the requests that got a token or ended."""
        segments = self.scheduler.schedule()
        progressed = []
        for (request, count), result in zip(segments, self.runner.step(segments), strict=True):
            if self._take(request, count, result):
                progressed.append(request)
        return progressed

    def abort(self, request: Request) -> None:
        """Drop a request and free what it holds."""
        if request.finish_reason is None:
            self._finish(request, "abort")

    def _take(self, request: Request, count: int, result: Result) -> bool:
        """Record one request's result; whether it is news to the outside."""
        if not result.finite:
            self.nonfinite += 1
            request.error = "the model produced a non-finite number for this request"
            self._finish(request, "error", poisoned=True)
            return True
        request.prompt_logprobs += result.prompt_logprobs
        self.scheduler.computed(request, count)
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
