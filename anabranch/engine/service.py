"""An engine somewhere else, and answers as asynchronous iterators: what a server talks to. Needs no torch."""

import asyncio
import socket
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from anabranch.engine import wire
from anabranch.engine.messages import EngineFailed, Facts, QueueFull, Update
from anabranch.engine.sampling import SamplingParams

_BUFFER = 1 << 20
# a step, and what it takes to let go of a GPU
_END_S = 20.0


class RemoteEngine(Protocol):
    """A loaded engine that obeys the messages on the other end of `sock`: a process, or a thread."""

    facts: Facts
    sock: socket.socket

    def fate(self) -> str:
        """Wait a little for its end, and say how it ended."""
        ...

    def close(self) -> None:
        """End it now."""
        ...


class Ticket:
    """An asynchronous iterator over one request's updates, ending after the one with a finish reason.

    `abort` may be called at any time from the event loop; a cancelled or closed iteration should call it.
    """

    def __init__(self, service: "EngineService", number: int) -> None:
        self._service, self._number = service, number
        self._updates: asyncio.Queue[Update] = asyncio.Queue()
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
            self._service.abort(self._number)

    def put(self, update: Update) -> None:
        """Wake whoever waits for this update."""
        self._updates.put_nowait(update)


class EngineService:
    """Hands requests to an engine and its news to their tickets, all in the event loop that started it.

    Args:
        engine: a loaded engine; it is told to stop by `drain`.
    """

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine, self.facts = engine, engine.facts
        self.failure: str | None = None
        self._stats, self._numbers = engine.facts.stats, count()
        self._tickets: dict[int, Ticket] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._stopping = False
        # what was submitted while the weights are being replaced, by number; None at other times
        self._held: dict[int, tuple[Any, ...]] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None

    @property
    def accepting(self) -> bool:
        return not self._stopping and self.failure is None

    async def start(self) -> None:
        """Listen to the engine from now on, in the running event loop."""
        reader, self._writer = await asyncio.open_connection(sock=self._engine.sock, limit=_BUFFER)
        self._listener = asyncio.create_task(self._listen(reader))

    async def ended(self) -> None:
        """Wait until the engine has ended, for whatever reason; `failure` is set unless it was told to."""
        assert self._listener is not None
        await asyncio.wait([self._listener])

    async def drain(self, seconds: float) -> None:
        """Accept nothing more; wait for what runs, abort what is not done after `seconds`, and end the engine."""
        self._stopping = True
        deadline = asyncio.get_running_loop().time() + seconds
        while self._tickets and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        self._say("stop")
        if self._listener is not None:
            await asyncio.wait([self._listener], timeout=_END_S)
            self._listener.cancel()
        if self._writer is not None:
            self._writer.close()
        await asyncio.to_thread(self._engine.close)

    def submit(self, prompt: list[int], params: SamplingParams, *, skip_special: bool = True) -> Ticket:
        """Queue a request.

        Raises:
            ValueError: a token id is unknown, or the request can never fit.
            QueueFull: the service is draining, or its engine failed.
        """
        if not self.accepting:
            raise QueueFull("the server is shutting down" if self.failure is None else f"engine failed: {self.failure}")
        self.facts.limits.check(prompt, params)
        number = next(self._numbers)
        ticket = self._tickets[number] = Ticket(self, number)
        message = ("submit", number, prompt, params, skip_special, time.perf_counter())
        if self._held is None:
            self._say(*message)
        else:
            self._held[number] = message
        return ticket

    def abort(self, number: int) -> None:
        """End a request; its ticket hears of it when the engine has."""
        if number in self._tickets:
            if self._held is not None and self._held.pop(number, None) is not None:
                self._tickets.pop(number).put(Update(finish_reason="abort"))
            else:
                self._say("abort", number)

    async def flush_cache(self) -> bool:
        """Forget cached prefixes; False if there is no prefix cache."""
        return await self._call("flush_cache")

    async def expert_load(self) -> dict[str, Any]:
        """Tokens that each expert was given so far; see `engine.facts.load_document`."""
        return await self._call("expert_load")

    @property
    def updating(self) -> bool:
        """Whether the weights are being replaced."""
        return self._held is not None

    async def update_weights(self, directory: Path, *, abort: bool = False) -> tuple[int, int]:
        """Overwrite the weights with those of a checkpoint, between requests: what runs ends first, what comes waits.

        Args:
            abort: end at once what runs.

        Returns:
            How many weights were written, and how many requests waited meanwhile.

        Raises:
            ValueError: the engine refused, and goes on with the weights that it had; or it is being updated already.
            EngineFailed: it has ended, or is being drained.
        """
        if self._held is not None:
            raise ValueError("the weights are being replaced already")
        self._held = {}
        try:
            for number in list(self._tickets) if abort else ():
                self._say("abort", number)
            while self.accepting and len(self._tickets) > len(self._held):
                await asyncio.sleep(0.01)
            return await self._call("update_weights", directory), len(self._held)
        finally:
            held, self._held = self._held, None
            for message in held.values():
                self._say(*message)

    async def start_profile(self, directory: Path) -> None:
        """Record the coming steps with torch.profiler; ValueError: a recording is running already."""
        await self._call("start_profile", directory)

    async def stop_profile(self, directory: Path) -> Path:
        """Write the Chrome trace and return its path; ValueError: nothing is being recorded."""
        return await self._call("stop_profile", directory)

    def stats(self) -> Mapping[str, Any]:
        """Counts and levels, as of the last step."""
        return self._stats

    async def _call(self, name: str, *args: Any) -> Any:
        """What the engine returns between two steps.

        Raises:
            ValueError: the engine refused.
            EngineFailed: it has ended.
        """
        if not self.accepting:
            raise EngineFailed(f"the engine failed: {self.failure}" if self.failure else "the server is shutting down")
        number = next(self._numbers)
        self._calls[number] = result = asyncio.get_running_loop().create_future()
        self._say("call", number, name, args)
        try:
            return await result
        finally:
            del self._calls[number]

    def _say(self, *message: Any) -> None:
        if self._writer is not None and self.failure is None and not self._writer.is_closing():
            self._writer.write(wire.pack(message))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        reason = None
        try:
            while reason is None:
                reason = self._hear(await wire.receive_async(reader))
        except (asyncio.IncompleteReadError, OSError):
            reason = await asyncio.to_thread(self._engine.fate)
        except Exception as error:
            reason = f"what it said makes no sense: {type(error).__name__}: {error}"
        if not self._stopping or self._tickets:
            self._fail(reason)

    def _hear(self, message: tuple[Any, ...]) -> str | None:
        """Pass a message on; the reason of the engine's failure, if it is about that."""
        match message:
            case ("news", updates, stats):
                self._stats = stats
                for number, fields in updates:
                    update = Update._make(fields)
                    self._tickets[number].put(update)
                    if update.finish_reason is not None:
                        del self._tickets[number]
            case ("result", number, value, error):
                if (result := self._calls.get(number)) is not None and not result.done():
                    result.set_result(value) if error is None else result.set_exception(ValueError(error))
            case ("failed", reason):
                return reason
        return None

    def _fail(self, reason: str) -> None:
        """Everyone who waits must hear of it."""
        self.failure = reason
        for ticket in self._tickets.values():
            ticket.put(Update(finish_reason="error", error=f"the engine failed: {reason}"))
        self._tickets.clear()
        for result in self._calls.values():
            if not result.done():
                result.set_exception(EngineFailed(f"the engine failed: {reason}"))
