"""Norms in plain PyTorch. See spec.py for shapes. `total` sums over the last dimension."""

import torch

from anabranch.ops.arithmetic import Total, row_sum, sigmoid, unit_rms


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, total: Total = row_sum) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps), rounded to x's dtype, then times weight."""
    return unit_rms(x.float(), eps, total).type_as(x) * weight.type_as(x)


def add_rms_norm(
    x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float, total: Total = row_sum
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + update, rms_norm of it); the sum is rounded to x's dtype before it is normed."""
    added = x + update
    return added, rms_norm(added, weight, eps, total)


def l2_norm(x: torch.Tensor, total: Total = row_sum) -> torch.Tensor:
    """Per head unit length in fp32: x / sqrt(sum(x^2) + 1e-6). The eps is added to the SUM, not to the mean."""
    x32 = x.float()
    return x32 * torch.rsqrt(total(x32.square()) + 1e-6).unsqueeze(-1)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, total: Total = row_sum
) -> torch.Tensor:
    """RMSNorm over each head's channels times weight times sigmoid(gate): [T, H, D] -> [T, H*D]."""
    normed = unit_rms(x.float(), eps, total) * weight.float()
    return (normed.flatten(1) * sigmoid(gate.float(), total)).type_as(x)
