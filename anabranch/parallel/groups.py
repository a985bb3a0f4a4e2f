"""Collectives over torch.distributed: NCCL between GPUs, gloo between CPUs."""

import gc
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from anabranch.config.parallel import ParallelConfig
from anabranch.parallel.collectives import Counts, Group
from anabranch.parallel.layout import Layout

_KINDS = ("tp", "attn_tp", "dp", "pp")
# torch 2.13 renamed both
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_SENDS = 8  # hand-overs that may be under way between CPUs


class ProcessGroups:
    """One rank's collectives.

    In deterministic mode every sum is taken in rank order and in fp32, whatever the number of rows: the algorithms of
    a communication library split a buffer by its size, so that an element's bits would depend on its neighbours.
    """

    def __init__(
        self,
        place: ParallelConfig,
        groups: Mapping[str, dist.ProcessGroup | None],
        stages: tuple[int, ...],
        deterministic: bool,
    ) -> None:
        self.place, self._groups, self._stages, self.ordered = place, groups, stages, deterministic
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def all_reduce(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        peers = self._groups[group]
        if peers is None:
            return x
        if self.ordered:
            return _in_order(_stack(x, peers))
        dist.all_reduce(x, group=peers)
        return x

    def all_gather(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        peers = self._groups[group]
        return x if peers is None else _stack(x, peers).movedim(0, -2).flatten(-2)

    def broadcast(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        peers = self._groups[group]
        if peers is not None:
            x = x.contiguous()
            dist.broadcast(x, group_src=0, group=peers)
        return x

    def gather_rows(self, x: torch.Tensor, counts: Counts) -> torch.Tensor:
        peers = self._groups["dp"]
        if peers is None:
            return x
        counts = counts or (len(x),) * self.place.dp_size
        most = max(counts)
        if len(x) < most:
            x = torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])
        blocks = _stack(x, peers)
        if min(counts) == most:
            return blocks.flatten(0, 1)
        # what was padded for the exchange is not computed
        return torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)])

    def sum_rows(self, x: torch.Tensor, counts: Counts) -> torch.Tensor:
        peers, place = self._groups["dp"], self.place
        if peers is None:
            return self.all_reduce(x, "tp")
        counts = counts or (len(x) // place.dp_size,) * place.dp_size
        own = slice(sum(counts[: place.dp_rank]), sum(counts[: place.dp_rank + 1]))
        if self.ordered:
            everyone = self._groups["tp"]
            assert everyone is not None
            return _in_order(_stack(x, everyone)[:, own])
        most = max(counts)
        if min(counts) < most:
            blocks = x.new_zeros(len(counts), most, *x.shape[1:])
            for block, part in zip(blocks, x.split(list(counts)), strict=True):
                block[: len(part)] = part
            x = blocks.flatten(0, 1)
        mine = x.new_empty(most, *x.shape[1:])
        _reduce_scatter(mine, x.contiguous(), group=peers)
        return self.all_reduce(mine, "attn_tp")[: counts[place.dp_rank]]

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        peers = self._groups["tp"]
        if peers is None:
            return x
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=peers)
        return out

    def send(self, x: torch.Tensor) -> None:
        to = self._stages[self.place.pp_rank + 1]
        if x.is_cuda:
            dist.send(x, to, group=self._groups["pp"])
            return
        # a stage goes on with the next step while its peer still computes
        while len(self._sent) >= _SENDS:
            self._sent.popleft()[0].wait()
        work = dist.isend(x, to, group=self._groups["pp"])
        assert work is not None
        self._sent.append((work, x))

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        dist.recv(x, self._stages[self.place.pp_rank - 1], group=self._groups["pp"])
        return x


def join(
    layout: Layout, rank: int, store: Store, device: torch.device, *, deterministic: bool, timeout_s: float
) -> ProcessGroups:
    """Meet all ranks of the layout and make every group; each of them must call this.

    Raises:
        RuntimeError: not everyone came within `timeout_s` (torch.distributed's own words).
    """
    cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=store,
        rank=rank,
        world_size=layout.world,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if cuda else None,
    )
    groups: dict[str, dist.ProcessGroup | None] = {}
    # None for groups of others: torch returns a number for those
    made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    stages: tuple[int, ...] = ()
    for kind in _KINDS:
        for members in layout.groups(kind):
            # everyone makes every group, in one order; what has one member needs none
            if len(members) > 1 and members not in made:
                group = dist.new_group(members)
                made[members] = group if isinstance(group, dist.ProcessGroup) else None
            if rank in members:
                groups[kind] = made.get(members)
                stages = members if kind == "pp" else stages
    comm = ProcessGroups(layout.rank(rank), groups, stages, deterministic)
    if cuda and 1 < layout.tp == layout.dp_attention == layout.ep and not deterministic:
        # NCCL connects and allocates at the first exchange: now, not beside a full cache
        ones = (1,) * layout.tp
        comm.all_to_all(torch.zeros(layout.tp, device=device), ones, ones)
    return comm


def leave(seconds: float = 20.0) -> None:
    """Let go of all groups, if there are any; give up after `seconds`, as a member may be gone."""
    if not dist.is_initialized():
        return
    # NCCL waits until no captured graph holds work of its groups
    gc.collect()
    leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
    leaving.start()
    leaving.join(seconds)


def _stack(x: torch.Tensor, peers: dist.ProcessGroup) -> torch.Tensor:
    """x of every peer: [peers, *x.shape]."""
    out = x.new_empty(peers.size(), *x.shape)
    _gather(out.flatten(0, 1), x.contiguous(), group=peers)
    return out


def _in_order(parts: torch.Tensor) -> torch.Tensor:
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)
