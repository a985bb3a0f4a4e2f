"""What the two generating routes share: envelope and usage of a reply, streamed or whole."""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from fastapi import Request, Response

from anabranch.engine.messages import Update
from anabranch.server.desk import Session
from anabranch.server.errors import reply
from anabranch.server.protocol import Generation
from anabranch.server.streaming import DONE, EventStream, frame, unless_gone


class Choice(Protocol):
    """One growing answer."""

    def push(self, update: Update) -> list[dict[str, Any]]:
        """Take an update in; the `choices` entries of the chunks it makes."""
        ...

    def whole(self) -> dict[str, Any]:
        """The `choices` entry of the whole answer."""
        ...


class Usage:
    """Counts tokens over all choices; every prompt once, however many answers it has."""

    def __init__(self, choices_per_prompt: int) -> None:
        self._per_prompt, self._prompts, self._cached = choices_per_prompt, {}, {}
        self._completion = 0

    def count(self, index: int, update: Update) -> None:
        """Take an update of answer `index` in."""
        prompt = index // self._per_prompt
        self._prompts[prompt] = update.prompt_tokens
        self._cached[prompt] = max(update.cached_tokens, self._cached.get(prompt, 0))
        self._completion += len(update.token_ids)

    def document(self) -> dict[str, Any]:
        """The `usage` object."""
        prompt = sum(self._prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion,
            "total_tokens": prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


class Reply:
    """One reply to a request: `kind` is the object name of the whole, `chunk_kind` that of its chunks."""

    def __init__(self, body: Generation, model: str, id_prefix: str, kind: str, chunk_kind: str) -> None:
        self._kinds, self._usage = (kind, chunk_kind), Usage(body.choices)
        self._stream, (self._end_usage, self._every_usage) = bool(body.stream), body.usage_chunks
        self._id, self._created, self._model = f"{id_prefix}-{uuid.uuid4().hex}", int(time.time()), model
        self.extra: dict[str, Any] = {}

    async def send(self, request: Request, session: Session, choices: Sequence[Choice]) -> Response:
        """The response: events, or one document once all answers have ended. The session is closed in any case."""
        if self._stream:
            return EventStream(self._frames(session, choices), session.close)
        try:
            document = await unless_gone(request.receive, self._whole(session, choices))
        finally:
            session.close()
        return reply(200, document)

    async def _whole(self, session: Session, choices: Sequence[Choice]) -> dict[str, Any]:
        async for index, update in session.updates():
            self._usage.count(index, update)
            choices[index].push(update)
        answers = [choice.whole() for choice in choices]
        return self._envelope(self._kinds[0], self.extra, answers) | {"usage": self._usage.document()}

    async def _frames(self, session: Session, choices: Sequence[Choice]) -> AsyncIterator[bytes]:
        extra = self.extra
        async for index, update in session.updates():
            self._usage.count(index, update)
            for entry in choices[index].push(update):
                yield self._chunk([entry], self._every_usage, extra)
                extra = {}
        if self._end_usage:
            yield self._chunk([], True, {})
        yield DONE

    def _chunk(self, entries: list[dict[str, Any]], with_usage: bool, extra: dict[str, Any]) -> bytes:
        chunk = self._envelope(self._kinds[1], extra, entries)
        if self._end_usage:
            chunk["usage"] = self._usage.document() if with_usage else None
        return frame(chunk)

    def _envelope(self, kind: str, extra: dict[str, Any], entries: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return {**head, **extra, "choices": entries}
