"""The residual stream between layers: an ordinary running sum, or block attention residuals (Kimi-K3)."""

from dataclasses import dataclass, field

import torch

from anabranch.layers.linear import Linear, RMSNorm
from anabranch.layers.moe import Router, Routing


@dataclass(slots=True)
class Stream:
    """`prefix` [T, hidden]: the running sum, None right after it was banked. `bank`: frozen sums, oldest first.

    `pending` is an update that the sum still lacks: the norm that reads the stream next adds it in its own launch.
    Lives for one forward pass; a pipeline stage hands on `sum` and `bank`.
    """

    prefix: torch.Tensor | None
    bank: list[torch.Tensor] = field(default_factory=list)
    pending: torch.Tensor | None = None

    def add(self, update: torch.Tensor) -> None:
        """Continue the sum (rounded after every add), or restart it with `update`."""
        if self.prefix is None:
            self.prefix = update
        else:
            self.prefix, self.pending = self.sum, update

    def normed(self, norm: RMSNorm) -> torch.Tensor:
        """norm(sum)."""
        if self.pending is None:
            return norm(self.sum)
        assert self.prefix is not None
        self.prefix, y = norm.add(self.prefix, self.pending)
        self.pending = None
        return y

    def routed(self, norm: RMSNorm, gate: Router) -> tuple[torch.Tensor, Routing]:
        """norm(sum) and the choice of `gate` for it, in one launch."""
        prefix, update = (self.sum, None) if self.pending is None else (self.prefix, self.pending)
        assert prefix is not None
        self.prefix, y, routing = gate.normed(norm, prefix, update)
        self.pending = None
        return y, routing

    def mixed(self, read: RMSNorm, score: Linear, norm: RMSNorm) -> torch.Tensor:
        """norm of the mixture of banked sums and sum that `read` and `score` weigh (model_spec section 7)."""
        prefix, update = (self.sum, None) if self.pending is None else (self.prefix, self.pending)
        weights = (read.weight, score.weight, norm.weight)
        self.prefix, y = norm.ops.residual_norm(prefix, update, self.bank, *weights, norm.eps)
        self.pending = None
        return y

    def freeze(self) -> None:
        """Bank the sum so far; the next update restarts it."""
        self.bank.append(self.sum)
        self.prefix = None

    def at(self, rows: torch.Tensor) -> "Stream":
        """The stream of these tokens alone."""
        assert self.prefix is not None
        pending = None if self.pending is None else self.pending[rows]
        return Stream(self.prefix[rows], [row[rows] for row in self.bank], pending)

    @property
    def sum(self) -> torch.Tensor:
        """The running sum, complete."""
        assert self.prefix is not None, "the sum was banked and nothing was added since"
        if self.pending is not None:
            self.prefix, self.pending = self.prefix + self.pending, None
        return self.prefix
