"""Server-sent events, and work that ends when the client goes away."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from anabranch.server.errors import ApiError, error_body

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
# JSON leaves them as they are, and many clients cut lines at them although the standard does not
_LINE_ENDS = {ord(mark): f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"}


def frame(document: Mapping[str, Any]) -> bytes:
    """One event: a line of JSON, whatever text it holds."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    safe = text if text.isascii() else text.translate(_LINE_ENDS)
    return b"data: " + safe.encode() + b"\n\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Result of `work`, which is cancelled if the client closes the connection first (ApiError 499)."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client closed the connection")
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of events that are made while it is sent.

    An error becomes the last frame, as the status has been sent already; there is then no [DONE]. `close` is called
    however the response ends, also if it never starts.
    """

    def __init__(self, frames: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__()
        # proxies must pass every frame on at once
        self.raw_headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        self._frames, self._close = frames, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client has gone."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await unless_gone(receive, self._send(send))
        except ApiError as error:
            if error.status_code != 499:
                raise
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        async def push(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            async for data in self._frames:
                await push(data)
        except ApiError as error:
            await push(frame(error.body))
        except Exception as error:
            await push(frame(error_body(500, f"internal error: {type(error).__name__}")))
            await push(b"", more=False)
            raise
        await push(b"", more=False)
