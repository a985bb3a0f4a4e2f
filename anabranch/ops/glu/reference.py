"""Gated activations in plain PyTorch. See spec.py for shapes."""

import torch

from anabranch.config.model import ActivationConfig
from anabranch.ops.arithmetic import sigmoid, silu


def glu(gate_up: torch.Tensor, activation: ActivationConfig) -> torch.Tensor:
    """silu(gate) * up, or beta*tanh(gate/beta) * sigmoid(gate) * cap(up) with cap(u) = lb*tanh(u/lb)."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation.name == "silu":
        return silu(gate) * up
    gate32, up32 = gate.float(), up.float()
    capped = activation.beta * torch.tanh(gate32 / activation.beta) * sigmoid(gate32)
    if activation.linear_beta is not None:
        up32 = activation.linear_beta * torch.tanh(up32 / activation.linear_beta)
    return (capped * up32).to(gate_up.dtype)
