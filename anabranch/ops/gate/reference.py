"""The output gate in plain PyTorch. See spec.py for shapes."""

import torch

from anabranch.ops.arithmetic import sigmoid


def sigmoid_gate(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(g), rounding twice as the pair of torch operations does."""
    return x * sigmoid(g)
