"""How a request gets in: the API key, then a body that is bounded in size, time and depth."""

import asyncio
import hmac
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.types import ASGIApp, Receive, Scope, Send

from anabranch.server.errors import ApiError, reply
from anabranch.server.settings import ServerSettings

OPEN_PATHS = ("/health", "/metrics")


class KeyGuard:
    """ASGI middleware that asks for the API key before anything of a request is read."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app, self._expected = app, f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(given, self._expected):
                error = ApiError(401, "need the API key: Authorization: Bearer KEY", code="invalid_api_key")
                await reply(401, error.body, {"www-authenticate": "Bearer"})(scope, receive, send)
                return
        await self.app(scope, receive, send)


class JsonRequest(Request):
    """A request whose body is JSON within the limits of the settings."""

    async def body(self) -> bytes:
        """The whole body.

        Raises:
            ApiError: 400 not declared as JSON, 408 too slow, 413 too long (noticed while it arrives).
        """
        if not hasattr(self, "_body"):
            self._body = await self._read()
        return self._body

    async def json(self) -> Any:
        """The parsed body; ApiError 400: not UTF-8, not JSON, or nested too deeply."""
        try:
            # it has a limit of depth of its own, and knows neither NaN nor Infinity
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"the body is not valid JSON: {error}") from error

    async def _read(self) -> bytes:
        settings: ServerSettings = self.app.state.settings
        limit = settings.max_body_bytes
        too_long = ApiError(413, f"the body exceeds {limit} bytes", headers={"connection": "close"})
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise too_long
        kind = self.headers.get("content-type", "none").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise ApiError(400, f"Content-Type is {kind}; need application/json")
        body = bytearray()
        try:
            async with asyncio.timeout(settings.body_timeout_s):
                async for chunk in self.stream():
                    body += chunk
                    if len(body) > limit:
                        raise too_long
        except TimeoutError as error:
            message = f"the body did not arrive within {settings.body_timeout_s:g} s"
            raise ApiError(408, message, headers={"connection": "close"}) from error
        return bytes(body)


class JsonRoute(APIRoute):
    """A route that reads its body as a `JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler over our request."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json
