"""Between the routes and the engine: names, admission, time limits, and the updates of all answers of a request."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from anabranch.engine.messages import QueueFull, Update
from anabranch.engine.sampling import SamplingParams
from anabranch.engine.service import EngineService, Ticket
from anabranch.models.chat import ChatRenderer
from anabranch.models.tokenizer import Tokenizer
from anabranch.server.errors import ApiError, refusing
from anabranch.server.metrics import Metrics, Stopwatch
from anabranch.server.settings import ServerSettings


class Weights(NamedTuple):
    """What the engine's weights are: their directory, what whoever updated them called them, and how often that was."""

    path: str
    version: str = "default"
    updates: int = 0


class Desk:
    """One server's view of one engine.

    Raises:
        ValueError: the chat format of the checkpoint cannot be used.
    """

    def __init__(self, service: EngineService, tokenizer: Tokenizer | None, settings: ServerSettings) -> None:
        self.service, self.tokenizer, self.settings, self.facts = service, tokenizer, settings, service.facts
        self.model_name = settings.served_model_name or self.facts.path.resolve().name
        self.architecture, self.max_len = self.facts.architecture, self.facts.limits.context
        self._renderer = tokenizer and ChatRenderer.load(self.facts.path, tokenizer, self.architecture)
        self._longest_token = 1 if tokenizer is None else _longest_token(tokenizer)
        self.metrics = Metrics(self.model_name, self)
        self.weights = Weights(str(self.facts.path))
        self.created = int(time.time())
        self.in_progress = 0
        self.draining = False

    def stats(self) -> Mapping[str, Any]:
        """The engine's counters."""
        return self.service.stats()

    def fusions(self) -> Mapping[str, tuple[str, str]]:
        """Layer kind -> the chosen projection path, and why it was chosen."""
        return self.facts.fusions

    def check_model(self, name: str | None) -> None:
        """ApiError 404 unless `name` is the served model's, or nothing."""
        if name not in (None, "", self.model_name):
            message = f"the model {name!r} does not exist; served is {self.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_health(self) -> None:
        """ApiError 503 while shutting down, or after the engine has failed."""
        if self.service.failure is not None:
            raise ApiError(503, f"the engine failed: {self.service.failure}", code="engine_error")
        if self.draining or not self.service.accepting:
            raise ApiError(503, "the server is shutting down", headers={"connection": "close"})

    async def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a text, or a copy of ids; ApiError 400: no valid Unicode, too long, or no tokenizer."""
        if not isinstance(prompt, str):
            return list(prompt)
        self._check_length(prompt, "prompt")
        with refusing():
            return await asyncio.to_thread(self.need_tokenizer().encode, prompt)

    async def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation; ApiError 400: what the chat format cannot express, or no tokenizer."""
        self.need_tokenizer()
        assert self._renderer is not None
        for i, message in enumerate(messages):
            self._check_length(message.get("content"), f"messages[{i}]")
        with refusing(("messages", "tools", "tool_choice", "thinking_effort")):
            return await asyncio.to_thread(self._renderer.render, messages, **options)

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer; ApiError 400: this checkpoint (with dummy weights) has none."""
        if self.tokenizer is None:
            raise ApiError(400, "this checkpoint has no tokenizer; send /v1/completions a prompt of token ids")
        return self.tokenizer

    def _check_length(self, text: object, name: str) -> None:
        """Refuse without encoding what cannot fit: megabytes would take seconds."""
        least = len(text) // self._longest_token if isinstance(text, str) else 0
        if least > self.max_len:
            message = f"{name}: at least {least} tokens, which exceeds the context of {self.max_len}"
            raise ApiError(400, message, param=name, code="context_length_exceeded")

    def submit(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], *, skip_special: bool
    ) -> "Session":
        """Start an answer for every prompt and every one of `params`, in that order; all or none.

        Raises:
            ApiError: 400 what the engine refuses, 429 too many waiting, 503 shutting down.
        """
        self.check_health()
        count = len(prompts) * len(params)
        room = self.settings.max_queue + int(self.stats()["slots_total"])
        if count > room:
            raise ApiError(400, f"{count} answers asked for at once; this server takes {room}")
        if self.in_progress + count > room:
            raise _queue_full(f"{self.in_progress} answers are in progress; this server takes {room}")
        session = Session(self)
        try:
            with refusing(list(SamplingParams.__slots__)):
                for prompt in prompts:
                    for each in params:
                        session.add(self.service.submit(list(prompt), each, skip_special=skip_special))
        except QueueFull as error:
            session.close()
            raise _queue_full(str(error)) from error
        except ApiError:
            session.close()
            raise
        return session

    async def drain(self) -> None:
        """Refuse new requests, and wait until the running ones have ended; once."""
        if not self.draining:
            self.draining = True
            await self.service.drain(self.settings.drain_s)


def _longest_token(tokenizer: Tokenizer) -> int:
    """Bytes of the longest token: no token stands for more characters."""
    longest = 1
    for token_id in range(tokenizer.vocab_size):
        with suppress(ValueError):  # an id without a token
            longest = max(longest, len(tokenizer.token_bytes(token_id)))
    return longest


def _queue_full(message: str) -> ApiError:
    return ApiError(429, message, code="queue_full", headers={"retry-after": "1"})


class Session:
    """The answers to one HTTP request, in its event loop. Whoever holds it calls `close`."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._tickets: list[Ticket] = []
        self._arrived = time.perf_counter()
        limit = desk.settings.request_timeout_s
        self._deadline = None if limit is None else asyncio.get_running_loop().time() + limit

    def add(self, ticket: Ticket) -> None:
        """Take one more answer in."""
        self._tickets.append(ticket)
        self._desk.in_progress += 1

    def close(self) -> None:
        """Abort what still runs; safe to call again."""
        self._desk.in_progress -= len(self._tickets)
        for ticket in self._tickets:
            ticket.abort()
        self._tickets = []

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """(index of the answer, update) until every answer has ended.

        Raises:
            ApiError: 500 an answer failed, 503 it was ended by the shutdown, 504 the time is over.
        """
        try:
            if len(self._tickets) == 1:
                async for update in self._follow(self._tickets[0]):
                    yield 0, update
            else:
                async for pair in self._merged():
                    yield pair
        finally:
            self.close()

    async def _merged(self) -> AsyncIterator[tuple[int, Update]]:
        queue: asyncio.Queue[tuple[int, Update | Exception]] = asyncio.Queue()

        async def pump(index: int, ticket: Ticket) -> None:
            try:
                async for update in self._follow(ticket):
                    queue.put_nowait((index, update))
            except Exception as error:
                queue.put_nowait((index, error))  # raised where the updates are read

        pumps = [asyncio.create_task(pump(i, ticket)) for i, ticket in enumerate(self._tickets)]
        running = len(pumps)
        try:
            while running:
                index, update = await queue.get()
                if isinstance(update, Exception):
                    raise update
                running -= update.finish_reason is not None
                yield index, update
        finally:
            for each in pumps:
                each.cancel()

    async def _follow(self, ticket: Ticket) -> AsyncIterator[Update]:
        """Updates of one answer, timed and checked; the last one has a finish reason."""
        watch = Stopwatch(self._desk.metrics, self._arrived)
        finished = False
        while not finished:
            try:
                async with asyncio.timeout_at(self._deadline):
                    update = await anext(ticket)
            except TimeoutError as error:
                limit = self._desk.settings.request_timeout_s
                raise ApiError(504, f"the answer was not complete within {limit:g} s", code="timeout") from error
            now, finished = time.perf_counter(), update.finish_reason is not None
            self._check(update)
            watch.queued(update.queue_s)
            watch.tokens(len(update.token_ids), now)
            if finished:
                watch.end(now)
            yield update

    def _check(self, update: Update) -> None:
        if update.finish_reason == "error":
            raise ApiError(500, update.error or "the engine gave this answer up", code="engine_error")
        if update.finish_reason == "abort":
            if self._desk.draining:
                raise ApiError(503, "the server is shutting down; this answer was not completed")
            if self._desk.service.updating:
                raise ApiError(503, "the weights are being replaced; this answer was not completed")
            raise ApiError(500, "the engine aborted this answer", code="engine_error")
