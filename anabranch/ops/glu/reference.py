"""Gated activations in plain PyTorch. See spec.py for shapes."""

import torch

from anabranch.config.model import ActivationConfig
from anabranch.ops.arithmetic import Total, row_sum, scalar, sigmoid, silu


def glu(gate_up: torch.Tensor, activation: ActivationConfig, total: Total = row_sum) -> torch.Tensor:
    """silu(gate) * up, or beta*tanh(gate/beta) * sigmoid(gate) * cap(up) with cap(u) = lb*tanh(u/lb)."""
    if activation.name == "silu":
        gate, up = gate_up.chunk(2, -1)
        return silu(gate, total) * up
    gate, up = gate_up.float().chunk(2, -1)
    capped = _cap(gate, activation.beta) * sigmoid(gate, total)
    if activation.linear_beta is not None:
        up = _cap(up, activation.linear_beta)
    return (capped * up).type_as(gate_up)


def _cap(x: torch.Tensor, bound: float) -> torch.Tensor:
    b = scalar(bound, x.dtype)
    return b * torch.tanh(x / b)
