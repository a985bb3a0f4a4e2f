"""An engine in a process of its own: how it starts, how it ends, and that it is never left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from anabranch.engine.messages import EngineFailed
from anabranch.engine.process import EngineProcess
from anabranch.engine.sampling import SamplingParams
from anabranch.engine.service import EngineService
from anabranch.models.tiny import init_checkpoint

OPTIONS = {"device": "cpu", "max_seqs": 2, "max_len": 512}
PARENT = """
import sys, time
from pathlib import Path
from anabranch.engine.process import EngineProcess

if __name__ == "__main__":
    with EngineProcess(Path(sys.argv[1]), {"device": "cpu", "max_seqs": 2}) as engine:
        print(engine.pid, flush=True)
        engine.load()
        print("loaded", flush=True)
        time.sleep(60)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("process") / "tiny-k3"
    init_checkpoint("k3", path, seed=0)
    return path


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def test_it_answers_ignores_signals_and_is_told_to_stop(checkpoint):
    async def go(engine):
        service = EngineService(engine)
        await service.start()
        ticket = service.submit([72], SamplingParams(max_tokens=60, ignore_eos=True))
        await anext(ticket)
        for each in (signal.SIGINT, signal.SIGTERM):
            os.kill(engine.pid, each)
        count = 1 + sum([len(update.token_ids) async for update in ticket])
        await service.drain(5)
        return count, service.failure

    with EngineProcess(checkpoint, OPTIONS) as engine:
        engine.load()
        assert engine.facts.document["ops"]
        assert asyncio.run(go(engine)) == (60, None)
        assert not alive(engine.pid)
        assert engine.fate() == "its process ended with status 0"


def test_a_killed_engine_says_so(checkpoint):
    async def go(engine):
        service = EngineService(engine)
        await service.start()
        ticket = service.submit([72], SamplingParams(max_tokens=400, ignore_eos=True))
        await anext(ticket)
        os.kill(engine.pid, signal.SIGKILL)
        last = [update async for update in ticket][-1]
        await service.drain(0)
        return last.finish_reason, last.error

    with EngineProcess(checkpoint, OPTIONS) as engine:
        engine.load()
        reason, error = asyncio.run(go(engine))
    assert (reason, error) == ("error", "the engine failed: its process was ended by SIGKILL (was memory short?)")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"memory_fraction": 1e-9}, "max_seqs=2 of"),
        ({"ops": {"mla_decode": "magic"}}, "magic"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_line(checkpoint, change, words, capfd):
    with EngineProcess(checkpoint, {**OPTIONS, **change}) as engine, pytest.raises(ValueError, match=words) as caught:
        engine.load()
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""
    assert not alive(engine.pid)


def test_an_end_while_loading_is_told(checkpoint):
    with EngineProcess(checkpoint, OPTIONS) as engine:
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineFailed, match=r"while it was loading: its process was ended by SIGKILL"):
            engine.load()


def test_an_error_of_ours_keeps_its_traceback(checkpoint, capfd):
    with EngineProcess(checkpoint, {"nonsense": 1}) as engine, pytest.raises(EngineFailed, match="TypeError"):
        engine.load()
    assert "Traceback" in capfd.readouterr().err


def test_leaving_the_block_ends_it(checkpoint):
    with EngineProcess(checkpoint, OPTIONS) as engine:
        assert alive(engine.pid)
    assert not alive(engine.pid)


@pytest.mark.parametrize(("wait_for", "how"), [("loading", signal.SIGTERM), ("loaded", signal.SIGKILL)])
def test_it_ends_with_its_parent(checkpoint, tmp_path, wait_for, how):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    command = [sys.executable, str(script), str(checkpoint)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if wait_for == "loaded":
            assert parent.stdout.readline() == "loaded\n"
        assert alive(pid)
        parent.send_signal(how)
        wait_until(lambda: not alive(pid))
