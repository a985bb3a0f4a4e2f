"""Collectives of one rank without its peers: nothing is exchanged, everything is noted and given a modelled time.

What peers would contribute to a sum is left out, the own part stands for it; rows that other replicas would send are
random numbers of the right shape. No modelled time enters a measured one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from anabranch.config.parallel import ParallelConfig
from anabranch.parallel.collectives import Counts, Group

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective over `ranks`; `bytes` of the whole tensor: what is summed, or what all parts make together."""

    kind: Kind
    ranks: int
    bytes: int

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in a ring, which is also what it receives."""
        return (2 if self.kind == "all_reduce" else 1) * self.bytes * (self.ranks - 1) / self.ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkModel:
    """An assumed time of a collective: latency + bytes sent by a rank / (rate of a direction x efficiency).

    The rate is NVLink 4's datasheet figure, for all ranks in one NVLink domain; efficiency and latency are assumptions.
    """

    bytes_per_s: float = 450e9
    efficiency: float = 0.8
    latency_us: float = 8.0

    def us(self, exchange: Exchange) -> float:
        """Modelled microseconds of one collective."""
        return self.latency_us + exchange.sent / (self.bytes_per_s * self.efficiency) * 1e6

    def __str__(self) -> str:
        rate = f"{self.bytes_per_s / 1e9:.0f} GB/s x {self.efficiency:g}"
        return f"{self.latency_us:g} us + bytes sent by a rank in a ring / ({rate})"


@dataclass(slots=True)
class SimulatedPeers:
    """The `Collectives` of one rank of `place`, alone on its device.

    `noted` holds the exchanges since `begin`. Each call of `gather_rows` after it has rows of its own, so that layers
    do not route the same ones; placing the own rows among them is one copy, which stands for the collective's writing.
    """

    place: ParallelConfig
    noted: list[Exchange] = field(default_factory=list)
    _rows: list[torch.Tensor] = field(default_factory=list)
    _turn: int = 0

    @property
    def ordered(self) -> bool:
        """Rows are gathered, as in a graph."""
        return True

    def begin(self) -> None:
        """A new pass."""
        self.noted.clear()
        self._turn = 0

    def all_reduce(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        self._note("all_reduce", self.place.tp_size if group == "tp" else self.place.attn_tp_size, x)
        return x

    def all_gather(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        raise AssertionError("logits of several ranks are not simulated")

    def broadcast(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        raise AssertionError("sampling over several ranks is not simulated")

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        raise AssertionError("an exchange of tokens, rank by rank, is not simulated")

    def gather_rows(self, x: torch.Tensor, counts: Counts) -> torch.Tensor:
        if self.place.dp_size == 1:
            return x
        own, total = self._own(x.shape[0], counts)
        if self._turn == len(self._rows):
            self._rows.append(torch.randn(total, *x.shape[1:], dtype=torch.float32, device=x.device).to(x.dtype))
        rows = self._rows[self._turn]
        self._turn += 1
        rows[own] = x
        self._note("all_gather", self.place.dp_size, rows)
        return rows

    def sum_rows(self, x: torch.Tensor, counts: Counts) -> torch.Tensor:
        if self.place.dp_size == 1:
            return self.all_reduce(x, "tp")
        own, _ = self._own(x.shape[0] // self.place.dp_size, counts)
        self._note("reduce_scatter", self.place.dp_size, x)
        return self.all_reduce(x[own], "attn_tp")

    def send(self, x: torch.Tensor) -> None:
        raise AssertionError("stages are not simulated")

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("stages are not simulated")

    def _own(self, rows: int, counts: Counts) -> tuple[slice, int]:
        """Where the own rows lie among those of all replicas, and how many these are."""
        counts, rank = counts or (rows,) * self.place.dp_size, self.place.dp_rank
        return slice(sum(counts[:rank]), sum(counts[: rank + 1])), sum(counts)

    def _note(self, kind: Kind, ranks: int, x: torch.Tensor) -> None:
        if ranks > 1:
            self.noted.append(Exchange(kind, ranks, x.numel() * x.element_size()))
