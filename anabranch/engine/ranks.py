"""Starts the ranks of a job on this node, or meets those that a launcher started; each of them then follows the head.

A rank that cannot go on says why to the head and ends; a rank whose head has gone ends too.
"""

import multiprocessing
import signal
import sys
import threading
import traceback
from collections.abc import Iterable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from anabranch.config.parallel import ParallelConfig
from anabranch.engine.build import EngineOptions, Peers, build_runner
from anabranch.engine.fleet import Fleet
from anabranch.engine.follower import Follower
from anabranch.engine.links import Hub, Post
from anabranch.engine.memory import MemoryPlan
from anabranch.engine.parent import follow_parent
from anabranch.engine.rank_facts import rank_facts
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
        _obey(post, layout.rank(where.rank), path, options, comm, device)
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


def _obey(
    post: Post, place: ParallelConfig, path: Path, options: EngineOptions, comm: ProcessGroups, device: torch.device
) -> None:
    """Load this rank's part, say so, and compute until told to stop."""
    peers = Peers(place=place, comm=comm, device=str(device), agree=lambda plan: _agree(post, plan))
    runner, memory, _ = build_runner(path, options, peers, None)
    post.send(("ready", rank_facts(runner, memory)))
    follower = Follower(post, runner)
    while follower.obey(post.receive()):
        pass


def _agree(post: Post, plan: MemoryPlan) -> tuple[MemoryPlan, int]:
    post.send(("plan", plan))
    match post.receive():
        case ("plan", snapshots, pages, vocab):
            return replace(plan, snapshots=snapshots, pages=pages), vocab
    raise SystemExit(0)  # the head could not go on, and says why


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
