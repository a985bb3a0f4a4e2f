"""What layers may ask of their peers. One process answers for itself; process groups implement the same protocol."""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch

Group = Literal["tp", "attn_tp"]
Counts = Sequence[int] | None


class Collectives(Protocol):
    """Sums and gathers over a named group of ranks, and the hand-over between pipeline stages.

    `counts`: rows of every attention replica in this step, in order; None without DP attention. `ordered`: every sum is
    taken in rank order whatever the number of rows, so that what is added and how must not depend on it either.
    """

    @property
    def ordered(self) -> bool: ...

    def all_reduce(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        """Elementwise sum over the group, same shape and dtype on every rank. May overwrite x."""
        ...

    def all_gather(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        """Concatenation along the last dimension, in rank order."""
        ...

    def broadcast(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        """What the first rank of the group holds, on all of them. May overwrite x."""
        ...

    def gather_rows(self, x: torch.Tensor, counts: Counts) -> torch.Tensor:
        """Own rows [T, C] -> those of all attention replicas [sum(counts), C], in order; x itself without any other."""
        ...

    def sum_rows(self, x: torch.Tensor, counts: Counts) -> torch.Tensor:
        """Partial sums [sum(counts), C] -> own rows [T, C], summed over the tp group. May overwrite x."""
        ...

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Rows for each rank of the tp group -> the rows that each of them has for this one [sum(received), ...].

        Args:
            sent: rows of x for each rank, in order; they are all of x.
            received: rows that each rank sends, which both sides must know.
        """
        ...

    def send(self, x: torch.Tensor) -> None:
        """Hand x to the same place of the next stage."""
        ...

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        """Fill x with what the previous stage sent, and return it."""
        ...


class SingleRank:
    """A group of one: every collective is the identity."""

    ordered = True

    def all_reduce(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        return x

    def gather_rows(self, x: torch.Tensor, counts: Counts) -> torch.Tensor:
        return x

    def sum_rows(self, x: torch.Tensor, counts: Counts) -> torch.Tensor:
        return x

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        return x

    def send(self, x: torch.Tensor) -> None:
        raise AssertionError("there is no next stage")

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("there is no previous stage")
