"""Routed experts in plain PyTorch: one pair of GEMMs for each expert that some token chose. See spec.py for shapes."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from anabranch.config.model import ActivationConfig
from anabranch.ops.glu.reference import glu


class ExpertBank(Protocol):
    """Weights of the experts `first .. first + count - 1`, in whatever format they are kept."""

    first: int
    count: int

    def gate_up(self, expert: int) -> torch.Tensor:
        """[2*I, W] of local expert `expert`: gate rows, then up rows."""
        ...

    def down(self, expert: int) -> torch.Tensor:
        """[W, I] of local expert `expert`."""
        ...


def routed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    bank: ExpertBank,
    activation: ActivationConfig,
    linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.linear,
) -> torch.Tensor:
    """sum_e weights_e * down_e(glu(gate_up_e x)) over the local experts."""
    y = torch.zeros_like(x).float()
    local = experts - bank.first
    chosen = torch.bincount(local[(local >= 0) & (local < bank.count)], minlength=bank.count)
    for expert in chosen.nonzero().flatten().tolist():
        tokens, choice = (local == expert).nonzero(as_tuple=True)
        hidden = glu(linear(x[tokens], bank.gate_up(expert)), activation)
        out = linear(hidden, bank.down(expert)).float()
        y = y.index_add(0, tokens, out * weights[tokens, choice, None])
    return y
