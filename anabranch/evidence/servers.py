"""Starts one arm's server for one run and ends it, whatever happens; every run has its own copy of the caches."""

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from anabranch.evidence.client import Client, ClientSpec
from anabranch.evidence.spec import ArmSpec

_POLL_S = 0.1


@contextlib.asynccontextmanager
async def served(arm: ArmSpec, run_dir: Path, slot: str) -> AsyncIterator[str]:
    """URL of the arm's server, which has answered its health check.

    Raises:
        ValueError: the server ends or does not answer within its time; the message has the last lines of its log.
    """
    if arm.url is not None:
        yield arm.url
        return
    port, log = arm.port or free_port(), run_dir / "logs" / f"{slot}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    copies = run_dir / "caches" / slot
    env = environment() | dict(arm.env) | clone_caches(arm, copies)
    words = fill(arm.command or "", port=port, run_dir=run_dir)
    process = None
    try:
        with log.open("wb") as output:
            process = start(words, env, output.fileno())
        url = f"http://127.0.0.1:{port}"
        await _healthy(process, url, arm, log)
        yield url
    finally:
        if process is not None:
            end(process, arm.stop_timeout_s)
        shutil.rmtree(copies, ignore_errors=True)


def fill(command: str, **values: object) -> list[str]:
    """The words of a command, with {port} and {run_dir} filled in.

    Raises:
        ValueError: the command is empty or its quotes are not closed.
    """
    words = shlex.split(command)
    if not words:
        raise ValueError("command is empty")
    for name, value in values.items():
        words = [word.replace(f"{{{name}}}", str(value)) for word in words]
    return words


def environment() -> dict[str, str]:
    """This process's, with the folder of its own interpreter first in PATH: its `anabranch` and `python` are meant."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {**os.environ, "PATH": path}


def clone_caches(arm: ArmSpec, copies: Path) -> dict[str, str]:
    """Copies of the arm's baseline caches, as environment variables that name them.

    Raises:
        ValueError: a baseline is no folder.
    """
    found = {}
    for variable, baseline in arm.caches.items():
        if not Path(baseline).is_dir():
            raise ValueError(f"arm {arm.name!r}: cache {variable}={baseline}: no such folder to copy from")
        target = copies / variable
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(baseline, target)
        found[variable] = str(target)
    return found


def start(words: list[str], env: dict[str, str], output: int) -> "subprocess.Popen[bytes]":
    """A process in a group of its own, so that all it starts can be ended with it.

    Raises:
        ValueError: there is no such program.
    """
    executable = shutil.which(words[0], path=env.get("PATH"))
    if executable is None:
        raise ValueError(f"command {words[0]!r}: no such program")
    return subprocess.Popen(
        [executable, *words[1:]],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def end(process: "subprocess.Popen[bytes]", timeout_s: float) -> None:
    """Ask the group to end, and kill what is left of it after `timeout_s`."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        pass
    finally:  # a second Ctrl-C, too, leaves no orphan
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


async def _healthy(process: "subprocess.Popen[bytes]", url: str, arm: ArmSpec, log: Path) -> None:
    limit = time.monotonic() + arm.start_timeout_s
    async with Client(ClientSpec(base_url=url, timeout_s=5.0)) as client:
        while await client.get(arm.health) is None:
            late = time.monotonic() > limit
            if late or process.poll() is not None:
                what = f"is not healthy after {arm.start_timeout_s:g} s" if late else f"ended ({process.returncode})"
                lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
                raise ValueError(f"arm {arm.name!r}: the server {what}: {' | '.join(lines) or 'no output'} [{log}]")
            await asyncio.sleep(_POLL_S)
