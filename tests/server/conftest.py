"""Real servers over tiny models, on free loopback ports."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from anabranch.engine.llm import LLM
from anabranch.engine.process import EngineThread
from anabranch.engine.service import EngineService
from anabranch.models.tiny import init_checkpoint
from anabranch.server.app import create_app
from anabranch.server.process import listen
from anabranch.server.settings import ServerSettings


class Live:
    """A server in a thread, and the engine behind it."""

    def __init__(self, checkpoint: Path, **settings):
        self.llm = LLM(checkpoint, max_seqs=4, max_len=1024, prefill_chunk=128)
        self.service = EngineService(EngineThread(self.llm))
        self.app = create_app(self.service, self.llm.tokenizer, ServerSettings(port=0, **settings))
        self._sock = listen(ServerSettings(port=0))
        self.port = self._sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = uvicorn.Server(uvicorn.Config(self.app, log_level="warning"))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve([self._sock])))

    def __enter__(self) -> "Live":
        self._thread.start()
        self.wait(lambda: self._server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()

    def idle(self) -> bool:
        """Whether nothing runs, waits, or holds a slot."""
        stats = self.service.stats()
        return not (stats["running"] or stats["waiting"] or stats["slots_used"] or self.app.state.desk.in_progress)

    @staticmethod
    def wait(condition, seconds: float = 10) -> None:
        """Until `condition` holds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.01)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("served")
    for architecture in ("k3", "kl"):
        init_checkpoint(architecture, root / f"tiny-{architecture}", seed=0)
    return {architecture: root / f"tiny-{architecture}" for architecture in ("k3", "kl")}


@pytest.fixture(scope="module")
def k3(checkpoints, tmp_path_factory) -> Iterator[Live]:
    """Kimi-K3."""
    settings = {"profile_dir": tmp_path_factory.mktemp("profiles"), "max_body_bytes": 12 << 20, "body_timeout_s": 1.0}
    with Live(checkpoints["k3"], **settings) as live:
        yield live


@pytest.fixture(scope="module")
def kl(checkpoints) -> Iterator[Live]:
    """Kimi-Linear."""
    with Live(checkpoints["kl"]) as live:
        yield live
