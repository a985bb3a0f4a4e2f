"""The engine on a thread of its own, and answers as asynchronous iterators: what a server talks to."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from anabranch.engine.llm import LLM
from anabranch.engine.request import Request, TokenLogprob
from anabranch.engine.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What became known about an answer since the last update. `prompt_logprobs` comes once, when asked for."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob] | None = None


class QueueFull(Exception):  # noqa: N818  (as queue.Full)
    """No request is accepted now."""


class Ticket:
    """An asynchronous iterator over one request's updates, ending after the one with a finish reason.

    `abort` may be called at any time from the event loop; a cancelled or closed iteration should call it.
    """

    def __init__(self, service: "EngineService", request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self._service, self._request, self._loop = service, request, loop
        self._updates: asyncio.Queue[Update] = asyncio.Queue()
        self._reported = 0
        self._done = False

    def __aiter__(self) -> "Ticket":
        return self

    async def __anext__(self) -> Update:
        if self._done:
            raise StopAsyncIteration
        update = await self._updates.get()
        self._done = update.finish_reason is not None
        return update

    def abort(self) -> None:
        """Drop the request; its slot is free after the step that is running now."""
        if not self._done:
            self._service.call(lambda: self._service.abort(self._request))

    def news(self) -> Update | None:
        """On the engine's thread: what is new since the last call, or None."""
        r, first = self._request, self._reported == 0
        new = r.sampled[self._reported :]
        text = r.text.take()
        if not new and not text and r.finish_reason is None:
            return None
        self._reported += len(new)
        return Update(
            text=text,
            token_ids=[s.token for s in new],
            logprobs=[s.logprob for s in new],
            top_logprobs=[s.top for s in new],
            finish_reason=r.finish_reason,
            error=r.error,
            prompt_tokens=len(r.prompt),
            cached_tokens=r.cached_tokens,
            prompt_logprobs=r.prompt_logprobs if first and r.prompt_logprobs else None,
        )


class EngineService:
    """Runs the engine until it is drained. All engine state is touched by its thread alone.

    Args:
        llm: the loaded model.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._tickets: dict[int, Ticket] = {}
        self._stopping = False
        self.failure: BaseException | None = None
        self._profiler: torch.profiler.profile | None = None
        self._thread = threading.Thread(target=self._run, name="anabranch-engine", daemon=True)

    @property
    def accepting(self) -> bool:
        return not self._stopping and self.failure is None

    def start(self) -> None:
        self._thread.start()

    async def drain(self, seconds: float) -> None:
        """Accept nothing more; wait for what runs, abort what is not done after `seconds`, and stop the thread."""
        self._stopping = True
        deadline = asyncio.get_running_loop().time() + seconds
        while self._tickets and asyncio.get_running_loop().time() < deadline and self._thread.is_alive():
            await asyncio.sleep(0.02)
        self.call(self._abort_all)
        while self._thread.is_alive():
            await asyncio.sleep(0.02)

    def submit(self, prompt: list[int], params: SamplingParams, *, skip_special: bool = True) -> Ticket:
        """Queue a request from inside a running event loop.

        Raises:
            ValueError: a token id is unknown, or the request can never fit.
            QueueFull: the service is draining, or its engine failed.
        """
        engine = self.llm.engine
        if not self.accepting:
            raise QueueFull("the server is shutting down" if self.failure is None else f"engine failed: {self.failure}")
        request = self.llm.request(prompt, params, skip_special=skip_special)
        engine.check(request)
        ticket = Ticket(self, request, asyncio.get_running_loop())

        def add() -> None:
            self._tickets[request.id] = ticket
            engine.add(request)

        self.call(add)
        return ticket

    def flush_cache(self) -> bool:
        """Forget cached prefixes; False if there is no prefix cache."""
        prefix = self.llm.engine.scheduler.prefix
        if prefix is not None:
            self.call(prefix.flush)
        return prefix is not None

    def start_profile(self, directory: Path) -> None:
        """Record the coming steps with torch.profiler.

        Raises:
            ValueError: a recording is running already.
        """
        if self._profiler is not None:
            raise ValueError("a profile is being recorded already")
        directory.mkdir(parents=True, exist_ok=True)
        self._profiler = torch.profiler.profile()
        self.call(self._profiler.start)

    def stop_profile(self, directory: Path) -> Path:
        """Write the Chrome trace and return its path.

        Raises:
            ValueError: nothing is being recorded.
        """
        if self._profiler is None:
            raise ValueError("no profile is being recorded")
        profiler, self._profiler = self._profiler, None
        done, path = threading.Event(), directory / f"trace-{len(list(directory.glob('trace-*.json')))}.json"

        def stop() -> None:
            profiler.stop()
            profiler.export_chrome_trace(str(path))
            done.set()

        self.call(stop)
        while not done.wait(0.1):
            if not self._thread.is_alive():
                raise ValueError("the engine has ended: no profile was written")
        return path

    def stats(self) -> dict[str, Any]:
        """Counts and levels, as of the last step."""
        engine, cache = self.llm.engine, self.llm.engine.runner.cache
        scheduler = engine.scheduler
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "slots_used": cache.slots - len(scheduler.slots),
            "slots_total": cache.slots,
            "pages_used": cache.pages - len(scheduler.pages),
            "pages_total": cache.pages,
            "prompt_tokens": engine.prompt_tokens,
            "generation_tokens": engine.generation_tokens,
            "prefix_queries": scheduler.prefix_queries,
            "prefix_hits": scheduler.prefix_hits,
            "preemptions": scheduler.preemptions,
            "nonfinite": engine.nonfinite,
            "finished": dict(engine.finished),
            "eager_steps": dict(engine.runner.eager_steps),
            "graph_replays": dict(engine.runner.graph_replays),
        }

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` on the engine's thread, between two steps."""
        with self._wake:
            self._calls.append(action)
            self._wake.notify()

    def abort(self, request: Request) -> None:
        """On the engine's thread: end a request and tell its ticket."""
        self.llm.engine.abort(request)
        if (ticket := self._tickets.pop(request.id, None)) is not None:
            self._deliver([ticket])

    def _abort_all(self) -> None:
        for ticket in list(self._tickets.values()):
            self.abort(ticket._request)

    def _run(self) -> None:
        engine = self.llm.engine
        try:
            while True:
                with self._wake:
                    while not self._calls and not engine.busy and not self._stopping:
                        self._wake.wait()
                    calls = [self._calls.popleft() for _ in range(len(self._calls))]
                for action in calls:
                    action()
                if engine.busy:
                    self._report(engine.step())
                elif self._stopping and not self._calls:
                    return
        except BaseException as error:  # the thread ends: everyone who waits must hear of it
            self.failure = error
            for ticket in list(self._tickets.values()):
                request = ticket._request
                request.finish_reason, request.error = "error", f"the engine failed: {error}"
            self._deliver(list(self._tickets.values()))
            self._tickets.clear()
            raise

    def _report(self, progressed: list[Request]) -> None:
        tickets = [ticket for r in progressed if (ticket := self._tickets.get(r.id)) is not None]
        self._deliver(tickets)
        for ticket in tickets:
            if ticket._request.finish_reason is not None:
                del self._tickets[ticket._request.id]

    def _deliver(self, tickets: list[Ticket]) -> None:
        """Hand news over to the event loops, one call for each loop and step."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, Update]]] = {}
        for ticket in tickets:
            if (update := ticket.news()) is not None:
                by_loop.setdefault(ticket._loop, []).append((ticket, update))
        for loop, news in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put, news)
            except RuntimeError:  # the loop closed while its server was shutting down: nobody listens any more
                for ticket, _ in news:
                    self.llm.engine.abort(ticket._request)


def _put(news: list[tuple[Ticket, Update]]) -> None:
    """On the event loop: wake everyone who waits for these updates."""
    for ticket, update in news:
        ticket._updates.put_nowait(update)
