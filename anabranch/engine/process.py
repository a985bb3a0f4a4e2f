"""Starts an engine beside the server: in a process of its own, or in a thread of this one."""

import gc
import multiprocessing
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.engine import wire
from anabranch.engine.messages import EngineFailed, Facts
from anabranch.engine.parent import follow_parent

if TYPE_CHECKING:
    from anabranch.engine.llm import LLM

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# between the end of a connection and that of the process
_REAP_S = 10.0


class EngineProcess:
    """A process that loads a model and computes what it is told; a context manager that never leaves it behind.

    The process heeds neither Ctrl-C nor SIGTERM, which a terminal or a supervisor sends to both processes: it ends when
    it is told to, or with its parent, however that ends.

    Args:
        model: checkpoint directory.
        options: keyword arguments of `LLM`.
    """

    facts: Facts

    def __init__(self, model: Path, options: Mapping[str, Any]) -> None:
        self.sock, theirs = socket.socketpair()
        # CUDA does not survive a fork
        context = multiprocessing.get_context("spawn")
        self._process: BaseProcess = context.Process(
            target=_main, args=(theirs, model, dict(options)), name="anabranch-engine"
        )
        # until it has its own handlers a Ctrl-C must wait, or it would end with a traceback
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def load(self) -> None:
        """Wait until the model is loaded; `facts` are known then.

        Raises:
            ValueError: what `LLM` raises; one line.
            EngineFailed: the process ended.
        """
        try:
            match wire.receive(self.sock):
                case ("ready", facts):
                    self.facts = facts
                case ("refused", reason):
                    raise ValueError(reason)
                case (_, reason):
                    self.fate()  # its traceback comes first
                    raise EngineFailed(f"the engine failed while it was loading: {reason}")
        except EOFError:
            raise EngineFailed(f"the engine failed while it was loading: {self.fate()}") from None

    def fate(self) -> str:
        """How the process ended; waits a little for it to do so."""
        self._process.join(_REAP_S)
        match self._process.exitcode:
            case None:
                return "its process closed the connection"
            case code if code < 0:
                hint = " (was memory short?)" if code == -signal.SIGKILL else ""
                return f"its process was ended by {signal.Signals(-code).name}{hint}"
            case code:
                return f"its process ended with status {code}"

    def close(self) -> None:
        """End the process if it has not ended, and reap it."""
        with suppress(OSError):
            self.sock.close()
        self._process.join(0)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()


class EngineThread:
    """The same in a thread, for a model that this process has loaded already."""

    def __init__(self, llm: "LLM") -> None:
        from anabranch.engine.facts import facts_of
        from anabranch.engine.worker import Worker

        self.sock, self._theirs = socket.socketpair()
        self.facts = facts_of(llm)
        self._worker = Worker(llm, self._theirs)
        self._thread = threading.Thread(target=self._run, name="anabranch-engine", daemon=True)
        self._thread.start()

    def fate(self) -> str:
        """How the thread ended."""
        self._thread.join(_REAP_S)
        return "its thread closed the connection" if self._thread.is_alive() else "its thread ended"

    def close(self) -> None:
        """Nobody listens any more: the thread ends after its step."""
        with suppress(OSError):
            self.sock.close()
        self._thread.join(_REAP_S)

    def _run(self) -> None:
        with self._theirs:
            self._worker.run()


def _main(sock: socket.socket, model: Path, options: dict[str, Any]) -> None:
    """The process: load, tell the facts, obey."""
    for each in _SIGNALS:
        # a handler, as "ignore" would be inherited by compilers that are started from here
        signal.signal(each, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=follow_parent, daemon=True).start()
    with sock, suppress(BrokenPipeError):
        _load_and_run(sock, model, options)


def _load_and_run(sock: socket.socket, model: Path, options: dict[str, Any]) -> None:
    import torch

    from anabranch.engine.facts import facts_of
    from anabranch.engine.links import RankFailed
    from anabranch.engine.llm import LLM
    from anabranch.engine.worker import Worker

    try:
        llm = LLM(model, **options)
        worker = Worker(llm, sock)
        if llm.fleet is None:
            # a full collection walks through the model, a step of 0.2 s; ranks must drop theirs before NCCL ends
            gc.collect()
            gc.freeze()
        wire.send(sock, ("ready", facts_of(llm)))
    except ValueError as error:
        wire.send(sock, ("refused", str(error)))
        return
    except (MemoryError, torch.OutOfMemoryError) as error:
        wire.send(sock, ("refused", f"{model}: out of memory: {error}"))
        return
    except RankFailed as failure:
        wire.send(sock, ("failed", str(failure)))
        sys.exit(1)
    except BaseException as error:
        wire.send(sock, ("failed", f"{type(error).__name__}: {error}"))
        raise
    try:
        worker.run()
    except RankFailed:
        sys.exit(1)  # the reason has been told
    finally:
        llm.close()
