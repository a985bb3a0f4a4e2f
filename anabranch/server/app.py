"""The HTTP application over one engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from anabranch import __version__
from anabranch.engine.service import EngineService
from anabranch.models.tokenizer import Tokenizer
from anabranch.server.chat import chat_routes
from anabranch.server.completions import completion_routes
from anabranch.server.desk import Desk
from anabranch.server.errors import install_errors
from anabranch.server.operations import control_routes, status_routes, token_routes
from anabranch.server.requests import KeyGuard
from anabranch.server.settings import ServerSettings


def create_app(service: EngineService, tokenizer: Tokenizer | None, settings: ServerSettings | None = None) -> FastAPI:
    """An application that listens to the engine from the start of its lifespan and drains it at the end.

    `app.state.desk.drain()` may be called earlier, so that /health tells of it while running answers end. Without a
    tokenizer prompts are token ids, and answers have no text.

    Raises:
        ValueError: the chat format of the checkpoint cannot be used.
    """
    settings = settings or ServerSettings()
    desk = Desk(service, tokenizer, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await desk.drain()

    # the pages of documentation would load scripts from another host
    app = FastAPI(title="Anabranch", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.desk, app.state.settings = desk, settings
    for routes in (completion_routes, chat_routes, status_routes, token_routes, control_routes):
        app.include_router(routes(desk))
    install_errors(app)
    if settings.api_key is not None:
        app.add_middleware(KeyGuard, api_key=settings.api_key)
    return app
