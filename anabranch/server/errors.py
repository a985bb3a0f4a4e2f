"""Every error as OpenAI clients expect it: {"error": {"message", "type", "param", "code"}} with a fitting status."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException

from anabranch.engine.messages import EngineFailed

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    499: "client_closed_request",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_FIELD = re.compile(r"(\w+)(?:\[\d+\])?(?:=| |:|\.|$)")


class ApiError(HTTPException):
    """An error with its HTTP status; raise it anywhere below a route."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.message, self.param, self.code = message, param, code

    @property
    def body(self) -> dict[str, Any]:
        return error_body(self.status_code, self.message, self.param, self.code)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON document of an error."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    one_line = " ".join(message.split())
    return {"error": {"message": one_line, "type": kind, "param": param, "code": code or status}}


@contextmanager
def refusing(fields: Sequence[str] = ()) -> Iterator[None]:
    """A ValueError in the block is the client's: status 400. `param` is named if the message starts with a field."""
    try:
        yield
    except ValueError as error:
        found = _FIELD.match(str(error))
        raise ApiError(400, str(error), param=found[1] if found and found[1] in fields else None) from error


def install_errors(app: FastAPI) -> None:
    """Answer everything that goes wrong below a route in the one form."""

    @app.exception_handler(StarletteHTTPException)
    async def _http(request: Request, error: StarletteHTTPException) -> Response:
        if isinstance(error, ApiError):
            return reply(error.status_code, error.body, error.headers)
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{request.method} {request.url.path}: {message}"
        return reply(error.status_code, error_body(error.status_code, message), error.headers)

    @app.exception_handler(EngineFailed)
    async def _failed(request: Request, error: EngineFailed) -> Response:
        return reply(503, error_body(503, str(error), code="engine_error"))

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        message, param = _first_line(error.errors())
        return reply(400, error_body(400, message, param))

    # Starlette raises it again after this answer, so that the traceback is logged
    @app.exception_handler(Exception)
    async def _broken(request: Request, error: Exception) -> Response:
        return reply(500, error_body(500, f"internal error: {type(error).__name__}"))


def reply(status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response in ASCII: a message may quote what UTF-8 cannot hold."""
    return Response(json.dumps(body), status, headers, media_type="application/json")


def _first_line(errors: Sequence[Any]) -> tuple[str, str | None]:
    """One line on the first error, which names the field and what is accepted; and the field."""
    first = errors[0]
    where = [part for part in first["loc"] if part not in ("body", "query", "path")]
    names = [str(where[0])] if where else []
    names += [f"[{part}]" if isinstance(part, int) else f".{part}" for part in where[1:]]
    path = "".join(names)
    message = str(first["msg"]).removeprefix("Value error, ")
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{path or 'body'}: {message}{more}", path or None
