"""The residual stream between layers: an ordinary running sum, or block attention residuals (Kimi-K3)."""

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class Stream:
    """`prefix` [T, hidden]: the running sum, None right after it was banked. `bank`: frozen sums, oldest first.

    Lives for one forward pass; a pipeline stage hands both on.
    """

    prefix: torch.Tensor | None
    bank: list[torch.Tensor] = field(default_factory=list)

    def add(self, update: torch.Tensor) -> None:
        """Continue the sum (rounded after every add), or restart it with `update`."""
        self.prefix = update if self.prefix is None else self.prefix + update

    def freeze(self) -> None:
        """Bank the sum so far; the next update restarts it."""
        self.bank.append(self.sum)
        self.prefix = None

    @property
    def sum(self) -> torch.Tensor:
        assert self.prefix is not None, "the sum was banked and nothing was added since"
        return self.prefix
