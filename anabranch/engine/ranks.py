"""Starts the ranks of a job on this node, or meets those that a launcher started; and what a rank does that is told.

A rank that cannot go on says why to the head and ends; a rank whose head has gone ends too.
"""

import multiprocessing
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from anabranch.engine.build import EngineOptions, Peers, build_runner
from anabranch.engine.fleet import Fleet
from anabranch.engine.links import Hub, Post
from anabranch.engine.memory import MemoryPlan
from anabranch.engine.orders import Shadows
from anabranch.engine.process import follow_parent
from anabranch.models.update import update_weights
from anabranch.parallel.groups import ProcessGroups, join, leave
from anabranch.parallel.layout import Layout
from anabranch.parallel.rendezvous import LOADING_S, Rendezvous, from_environment, on_this_node

START_METHOD = "spawn"  # CUDA does not survive a fork
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def muster(layout: Layout, path: Path, options: EngineOptions) -> Fleet:
    """Gather the ranks of `layout`; to be called by every process that a launcher started, or by one alone.

    Only the head returns. Another rank computes what it is told, and ends its process with the job.

    Raises:
        ValueError: fewer GPUs than ranks, or another number of processes than ranks.
        RankFailed: a rank ended before it joined.
    """
    where = from_environment(layout.world)
    if where is not None and where.rank:
        sys.exit(_follow(where, layout, path, options))
    processes: dict[int, BaseProcess] = {}
    if where is None:
        device_of_rank(options.device, layout.world - 1, layout.world)
        where, store = on_this_node(layout.world)
        processes = _start(where, layout, path, options)
        kept: Store = PrefixStore("anabranch-0", store)
    else:
        kept = where.store()
    device = device_of_rank(options.device, where.local, where.machine)
    try:
        hub = Hub(where, kept, lambda rank: _fate(processes.get(rank)), options.rank_timeout)
        hub.kill = lambda: _kill(processes.values())
        try:
            comm = _join(layout, where, kept, device, options)
        except (RuntimeError, OSError) as error:
            raise hub.explain(error) from error
    except BaseException:
        _kill(processes.values())
        raise
    return Fleet(layout, hub, comm, device, processes)


def device_of_rank(name: str, local: int, machine: int) -> torch.device:
    """The device of a machine's rank number `local`.

    Raises:
        ValueError: a numbered device, or fewer GPUs than ranks.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={name!r}: with several ranks accepted are auto, cpu, cuda; each takes its own")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if machine > torch.cuda.device_count():
        raise ValueError(
            f"{machine} ranks need as many GPUs, this machine has {torch.cuda.device_count()} (device=cpu needs none)"
        )
    return torch.device("cuda", local)


def _start(where: Rendezvous, layout: Layout, path: Path, options: EngineOptions) -> dict[int, BaseProcess]:
    context = multiprocessing.get_context(START_METHOD)
    processes: dict[int, BaseProcess] = {}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        for rank in range(1, layout.world):
            place = Rendezvous(
                rank=rank,
                world=where.world,
                local=rank,
                machine=where.machine,
                address=where.address,
                port=where.port,
                launched=False,
            )
            processes[rank] = context.Process(
                target=_main, args=(place, layout, path, options), name=f"anabranch-rank-{rank}", daemon=False
            )
            processes[rank].start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return processes


def _kill(processes: Iterable[BaseProcess]) -> None:
    for process in processes:
        process.kill()


def _fate(process: BaseProcess | None) -> str | None:
    """How a process of this node ended; None while it runs, or when it is not ours."""
    if process is None:
        return None
    process.join(0.2)
    match process.exitcode:
        case None:
            return None
        case code if code < 0:
            hint = " (was memory short?)" if code == -signal.SIGKILL else ""
            return f"was ended by {signal.Signals(-code).name}{hint}"
        case code:
            return f"ended with status {code}"


def _main(where: Rendezvous, layout: Layout, path: Path, options: EngineOptions) -> None:
    """A rank that the head started."""
    for each in _SIGNALS:
        signal.signal(each, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=follow_parent, daemon=True).start()
    if not torch.cuda.is_available() or options.device == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // where.machine))
    sys.exit(_follow(where, layout, path, options))


def _follow(where: Rendezvous, layout: Layout, path: Path, options: EngineOptions) -> int:
    """Compute what the head says until it says stop; the status of the process."""
    sys.stderr = RankStream(sys.stderr, where.rank)
    store = where.store()
    post = Post(where, store)
    try:
        device = device_of_rank(options.device, where.local, where.machine)
        comm = _join(layout, where, store, device, options)
        _Rank(post, layout.rank(where.rank), path, options, comm, device).obey()
    except ValueError as error:
        post.last_words("refused", str(error))
        return 2
    except (MemoryError, torch.OutOfMemoryError) as error:
        post.last_words("refused" if isinstance(error, MemoryError) else "failed", f"rank {where.rank}: {error}")
        return 1
    except Exception as error:
        post.last_words("failed", f"rank {where.rank}: {type(error).__name__}: {error}")
        if "torch/distributed" not in traceback.extract_tb(error.__traceback__)[-1].filename:
            raise
        # a peer has gone, and says more about it than our traceback
        print(f"lost a peer: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    post.close()
    leave()
    return 0


def _join(
    layout: Layout, where: Rendezvous, store: Store, device: torch.device, options: EngineOptions
) -> ProcessGroups:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return join(layout, where.rank, store, device, deterministic=options.deterministic, timeout_s=LOADING_S)


class _Rank:
    """One rank at work."""

    def __init__(
        self, post: Post, place: Any, path: Path, options: EngineOptions, comm: ProcessGroups, device: torch.device
    ) -> None:
        self._post, self._place, self._shadows = post, place, Shadows()
        peers = Peers(place=place, comm=comm, device=str(device), agree=self._agree)
        self.runner, self.memory, _ = build_runner(path, options, peers, None)
        self._calls: dict[str, Callable[..., Any]] = {
            "update_weights": self._update_weights,
            "expert_load": self.runner.model.expert_load,
        }

    def obey(self) -> None:
        """Until told to stop."""
        from anabranch.engine.facts import rank_facts

        self._post.send(("ready", rank_facts(self.runner, self.memory)))
        while True:
            match self._post.receive():
                case ("step", order):
                    self._step(order)
                case ("look", changes, slots):
                    self._change(changes)
                    self._post.send(("finite", [bool(finite) for finite in self._look(slots)]))
                case ("call", name, args):
                    self._post.send(("answer", self._call(name, args)))
                case ("stop",):
                    return

    def _step(self, order: Any) -> None:
        self._change(order.changes)
        results = self.runner.step(self._shadows.obey(order), order.turn)
        if order.parts and self._place.samples:
            self._post.send(("results", results))

    def _change(self, changes: Any) -> None:
        for what, slot, other in changes:
            getattr(self.runner.cache, what)(slot, other)

    def _look(self, slots: Sequence[int]) -> list[torch.Tensor]:
        found = [self.runner.cache.finite(slot) for slot in slots]
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize(self.runner.device)
        return found

    def _agree(self, plan: MemoryPlan) -> tuple[MemoryPlan, int]:
        self._post.send(("plan", plan))
        match self._post.receive():
            case ("plan", snapshots, pages, vocab):
                return replace(plan, snapshots=snapshots, pages=pages), vocab
        raise SystemExit(0)  # the head could not go on, and says why

    def _call(self, name: str, args: Any) -> tuple[Any, str | None]:
        self._post.unhurried()
        try:
            return self._calls[name](*args), None
        except ValueError as error:
            return None, str(error)

    def _update_weights(self, given: Path | Sequence[tuple[str, torch.Tensor]], write: bool) -> int:
        return update_weights(self.runner.model, given, write=write)


class RankStream:
    """A text stream whose lines say which rank wrote them."""

    def __init__(self, stream: TextIO, rank: int) -> None:
        self._stream, self._mark, self._start = stream, f"[rank {rank}] ", True

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            self._stream.write(self._mark + line if self._start else line)
            self._start = line.endswith("\n")
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
