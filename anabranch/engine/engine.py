"""Continuous batching: each step computes one token of every running request and a chunk of waiting prompts."""

import time
from collections import deque
from collections.abc import Iterable

from anabranch.engine.cache import pages_for
from anabranch.engine.request import Request
from anabranch.engine.runner import Runner
from anabranch.engine.sampler import Sampled


class Engine:
    """First come, first served. A request is admitted once a slot and the pages for its longest answer are free.

    Args:
        runner: model and cache.
        eos_ids: ids that end an answer.
        max_context: longest prompt plus answer.
        prefill_chunk: most prompt tokens computed in one step.
    """

    def __init__(self, runner: Runner, eos_ids: Iterable[int], max_context: int, prefill_chunk: int) -> None:
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk={prefill_chunk}: need at least 1")
        self.runner, self.eos_ids = runner, frozenset(eos_ids)
        self.max_context, self.prefill_chunk = max_context, prefill_chunk
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: the prompt is empty, or prompt plus answer can never fit.
        """
        if not request.prompt:
            raise ValueError("the prompt has no tokens; need at least 1")
        if request.limit > self.max_context:
            raise ValueError(
                f"prompt of {len(request.prompt)} tokens plus max_tokens={request.params.max_tokens} "
                f"exceeds the context of {self.max_context}"
            )
        if pages_for(request.limit) > self.runner.cache.pages:
            raise ValueError(
                f"prompt of {len(request.prompt)} tokens plus max_tokens={request.params.max_tokens} needs "
                f"{pages_for(request.limit)} cache pages; there are {self.runner.cache.pages}"
            )
        self.waiting.append(request)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[Request]:
        """Run one batch; returns the requests that got a token (finished ones included)."""
        segments = self._schedule()
        banned = [self._banned(r) for r, _ in segments]
        progressed = []
        for (request, _), sampled in zip(segments, self.runner.step(segments, banned), strict=True):
            if sampled is not None:
                self._append(request, sampled)
                progressed.append(request)
        return progressed

    def abort(self, request: Request) -> None:
        """Drop a request and free what it holds."""
        self._finish(request, "abort")

    def _schedule(self) -> list[tuple[Request, int]]:
        while self.waiting and (taken := self.runner.cache.take(self.waiting[0].limit)):
            request = self.waiting.popleft()
            request.slot, request.pages = taken
            self.running.append(request)
        segments = [(r, 1) for r in self.running if r.decoding]
        budget = self.prefill_chunk
        for request in self.running:
            if not request.decoding and budget:
                count = min(budget, request.remaining)
                segments.append((request, count))
                budget -= count
        return segments

    def _banned(self, request: Request) -> list[int]:
        if len(request.sampled) >= request.params.min_tokens:
            return []
        return [*self.eos_ids, *request.params.stop_token_ids]

    def _append(self, request: Request, sampled: Sampled) -> None:
        if request.first_token is None:
            request.first_token = time.perf_counter()
        request.sampled.append(sampled)
        token, params = sampled.token, request.params
        if token in params.stop_token_ids or (token in self.eos_ids and not params.ignore_eos):
            self._finish(request, "stop")
            return
        request.text.push(token)
        if request.text.stopped:
            self._finish(request, "stop")
        elif len(request.sampled) >= params.max_tokens:
            self._finish(request, "length")

    def _finish(self, request: Request, reason: str) -> None:
        request.text.finish()
        request.finish_reason, request.finished = reason, time.perf_counter()
        if request in self.running:
            self.running.remove(request)
            self.runner.cache.give_back(request.slot, request.pages)
        elif request in self.waiting:
            self.waiting.remove(request)
