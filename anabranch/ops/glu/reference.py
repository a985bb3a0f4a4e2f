"""Gated activations in plain PyTorch. See spec.py for shapes."""

import torch

from anabranch.config.model import ActivationConfig
from anabranch.ops.arithmetic import sigmoid, silu


def glu(gate_up: torch.Tensor, activation: ActivationConfig) -> torch.Tensor:
    """silu(gate) * up, or beta*tanh(gate/beta) * sigmoid(gate) * cap(up) with cap(u) = lb*tanh(u/lb)."""
    if activation.name == "silu":
        gate, up = gate_up.chunk(2, -1)
        return silu(gate) * up
    gate, up = gate_up.float().chunk(2, -1)
    capped = activation.beta * torch.tanh(gate / activation.beta) * sigmoid(gate)
    if activation.linear_beta is not None:
        up = activation.linear_beta * torch.tanh(up / activation.linear_beta)
    return (capped * up).type_as(gate_up)
