"""A server process: the socket, the line that tells the URL, and an orderly end."""

import asyncio
import signal
import socket
from types import FrameType

import typer
import uvicorn
from fastapi import FastAPI

from anabranch.engine.messages import EngineFailed
from anabranch.server.settings import ServerSettings

# between the failure of the engine and the end: clients are told why, routers see /health
LINGER_S = 2.0


def listen(settings: ServerSettings) -> socket.socket:
    """A bound socket.

    Raises:
        ValueError: the address is unknown, in use or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[
            0
        ]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise ValueError(f"cannot listen on {settings.host} port {settings.port}: {error.strerror}") from error
    return sock


def run(app: FastAPI, sock: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT, then drain. A second signal does not wait.

    Raises:
        EngineFailed: the engine ended by itself; everyone who waited for it has been told.
    """
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)
    _Server(config, app, sock).run(sockets=[sock])
    if (failure := app.state.desk.service.failure) is not None:
        raise EngineFailed(f"the engine failed: {failure}")


class _Server(uvicorn.Server):
    """Goes on answering while it drains: /health is then 503, which tells a router to go elsewhere."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, sock: socket.socket) -> None:
        super().__init__(config)
        self._desk, self._sock = app.state.desk, sock
        self._drain: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        host, port = self._sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        typer.echo(f"{self._desk.model_name}: serving at http://{shown}:{port}/v1")
        self._watch = self._loop.create_task(self._exit_after_the_engine())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain is not None or not self.started:
            super().handle_exit(sig, frame)
            return
        if sig == signal.SIGINT:
            self._captured_signals.append(sig)  # the status of Ctrl-C is not that of an ordered end
        self._loop.call_soon_threadsafe(self._begin_drain)

    async def _exit_after_the_engine(self) -> None:
        await self._desk.service.ended()
        if self._desk.service.failure is not None:
            await asyncio.sleep(LINGER_S)
            self.should_exit = True

    def _begin_drain(self) -> None:
        self._drain = self._drain or self._loop.create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        try:
            await self._desk.drain()
        finally:
            self.should_exit = True
