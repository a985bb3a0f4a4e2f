"""What layers may ask of their peers. One process answers for itself; process groups implement the same protocol."""

from typing import Literal, Protocol

import torch

Group = Literal["tp", "attn_tp"]


class Collectives(Protocol):
    """Sums and gathers over a named group of ranks."""

    def all_reduce(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        """Elementwise sum over the group, same shape and dtype on every rank."""
        ...

    def all_gather(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        """Concatenation along the last dimension, in rank order."""
        ...


class SingleRank:
    """A group of one: every collective is the identity."""

    def all_reduce(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        return x
