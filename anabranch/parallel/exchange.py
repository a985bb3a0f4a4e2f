"""How rows reach the ranks of their experts under expert parallelism: every row to all ranks, or each where it must go.

Gather and reduce-scatter have sizes that a graph can hold, and serve shared experts that are divided over the ranks.
All-to-all sends a row once to each rank that holds one of its experts, after the ranks have told each other how many.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import torch

from anabranch.parallel.collectives import Collectives, Counts

_CHOICE = 4 + 4  # bytes of a weight (fp32) and an expert (int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What one MoE layer moves between ranks that each have rows of their own and whole experts.

    `ranks`: as many as attention replicas and as expert groups. `chosen` of `experts` a row. The rest is in bytes: of a
    row that is `gathered`, of its partial sum (`summed`), of a row as its experts read it (`there`) and give it `back`,
    and of the matrices of all `shared` experts.
    """

    ranks: int
    experts: int
    chosen: int
    gathered: int
    summed: int
    there: int
    back: int
    shared: int

    @property
    def reach(self) -> float:
        """Other ranks that a row is sent to on average, if every set of `chosen` distinct experts is as likely."""
        elsewhere = self.experts - self.experts // self.ranks
        return (self.ranks - 1) * (1 - comb(elsewhere, self.chosen) / comb(self.experts, self.chosen))

    def by_gather(self, counts: Sequence[int]) -> int:
        """Bytes that all ranks receive together: blocks are padded to the longest."""
        return self.ranks * (self.ranks - 1) * max(counts) * (self.gathered + self.summed)

    def by_all_to_all(self, counts: Sequence[int]) -> float:
        """The same, expected; the shared experts' matrices go to every rank, for its own rows alone."""
        row = self.there + self.chosen * _CHOICE + self.back
        return sum(counts) * self.reach * row + (self.ranks - 1) * self.shared

    def prefers_all_to_all(self, counts: Counts, captured: bool) -> bool:
        """Whether a step with `counts` rows of each replica takes all-to-all: where it moves fewer bytes.

        Never in a graph, whose sizes are fixed, nor where ranks have not agreed on counts. Every rank says the same.
        """
        return counts is not None and not captured and self.by_all_to_all(counts) < self.by_gather(counts)


@dataclass(frozen=True, slots=True)
class Visitors:
    """Rows that came to this rank's experts: `rows` [N, W], `weights` fp32 [N, k], `experts` int64 [N, k]; N may be 0.

    `index`: own rows in the order they were sent; `sent` and `received` count rows for and from each rank.
    """

    rows: torch.Tensor
    weights: torch.Tensor
    experts: torch.Tensor
    index: torch.Tensor
    own: int
    sent: list[int]
    received: list[int]


def dispatch(
    comm: Collectives, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, *, ranks: int, total: int
) -> Visitors:
    """Send each row to the ranks that hold one of its experts; the host waits for the counts.

    Args:
        x: own rows [T, W].
        weights: fp32 [T, k].
        experts: int64 [T, k], global; rank r holds experts r * total / ranks and following.
    """
    needed = torch.zeros(ranks, len(x), dtype=torch.bool, device=x.device)
    needed[experts // (total // ranks), torch.arange(len(x), device=x.device)[:, None]] = True
    index = needed.nonzero()[:, 1]  # by rank, then by row
    outgoing = needed.sum(1)
    incoming = comm.all_to_all(outgoing, (1,) * ranks, (1,) * ranks)
    sent, received = torch.stack([outgoing, incoming]).tolist()
    # one message: a row, its weights, its experts
    parts = [t[index].view(torch.uint8) for t in (x, weights, experts.int())]
    packed = comm.all_to_all(torch.cat(parts, 1), sent, received)
    rows, weights, numbers = (
        part.contiguous().view(like.dtype)
        for part, like in zip(packed.split([p.shape[1] for p in parts], 1), (x, weights, experts.int()), strict=True)
    )
    return Visitors(rows, weights, numbers.long(), index, len(x), sent, received)


def combine(comm: Collectives, visitors: Visitors, partial: torch.Tensor) -> torch.Tensor:
    """Sums over the ranks of what their experts made of visiting rows [N, W] -> own rows [T, W], added in fp32."""
    back = comm.all_to_all(partial, visitors.received, visitors.sent)
    total = back.new_zeros(visitors.own, back.shape[1], dtype=torch.promote_types(back.dtype, torch.float32))
    # a rank sends a row back once, so that each addition is one of distinct rows, in rank order
    for index, part in zip(visitors.index.split(visitors.sent), back.split(visitors.sent), strict=True):
        total[index] += part
    return total.to(partial.dtype)
