"""All ranks of a job as the head (global rank 0) uses them: what they are told, and what they agree on at the start."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import torch

from anabranch.engine import wire
from anabranch.engine.links import Hub
from anabranch.engine.memory import MemoryPlan
from anabranch.parallel.groups import ProcessGroups, leave
from anabranch.parallel.layout import Layout

_END_S = 10.0  # what a rank gets to let go of its device


class Fleet:
    """Every other rank, over the head's hub.

    Attributes:
        facts: what each rank said about itself when it was ready, by rank; the head's own are not among them.
    """

    def __init__(
        self,
        layout: Layout,
        hub: Hub,
        comm: ProcessGroups,
        device: torch.device,
        processes: Mapping[int, BaseProcess],
    ) -> None:
        self.layout, self.hub, self.comm, self.device = layout, hub, comm, device
        self.others = range(1, layout.world)
        self._replicas = [[r for r in layout.replica(i) if r] for i in range(layout.dp_attention)]
        self.facts: dict[int, dict[str, Any]] = {}
        # before multiprocessing waits for its children
        self.close = Finalize(self, _end, (hub, processes, device.type == "cuda"), exitpriority=100)

    def members(self, dp_rank: int) -> Sequence[int]:
        """The ranks of an attention replica, over all stages, without this one."""
        return self._replicas[dp_rank]

    def tell(self, dp_rank: int, message: tuple[Any, ...]) -> None:
        """Send an order to every other rank of a replica."""
        packed = wire.pack(message)
        for rank in self._replicas[dp_rank]:
            self.hub.send(rank, packed)

    def land(self) -> None:
        """Have every rank tell what came of the oldest step, though no later one follows it."""
        self._everyone(("land",))

    def agree(self, plan: MemoryPlan, vocab: int | None) -> MemoryPlan:
        """The most that every rank has room for, since they all hold the same slots and pages.

        Raises:
            ValueError, RankFailed: a rank could not load the model; says why.
        """
        plans = [plan, *(self.hub.receive(rank, "plan") for rank in self.others)]
        least = min(p.snapshots for p in plans), min(p.pages for p in plans)
        self._everyone(("plan", *least, vocab))
        return replace(plan, snapshots=least[0], pages=least[1])

    def ready(self) -> None:
        """Wait until every rank can compute, and keep what it says about itself."""
        self.facts = {rank: self.hub.receive(rank, "ready") for rank in self.others}

    def call(self, name: str, *args: Any) -> list[Any]:
        """What every other rank's `name` returns, in the order of ranks; it runs between two steps.

        Raises:
            ValueError: a rank refused.
        """
        self._everyone(("call", name, args))
        return [self.answer(rank) for rank in self.others]

    def answer(self, rank: int) -> Any:
        value, error = self.hub.receive(rank, "answer")
        if error is not None:
            raise ValueError(error)
        return value

    def _everyone(self, message: tuple[Any, ...]) -> None:
        packed = wire.pack(message)
        for rank in self.others:
            self.hub.send(rank, packed)


def _end(hub: Hub, processes: Mapping[int, BaseProcess], on_cuda: bool) -> None:
    """Tell every rank to stop, and leave none behind."""
    hub.close()
    if hub.failure is not None:
        hub.kill()
    else:  # NCCL lets go of its groups only with everyone
        leave()
    for process in processes.values():
        process.join(_END_S)
        if process.is_alive():
            process.kill()
            process.join()
    if not on_cuda:  # NCCL may wait for a member that has gone
        leave()
