"""Norms in plain PyTorch. See spec.py for shapes. `total` sums over the last dimension."""

from collections.abc import Callable

import torch

from anabranch.ops.arithmetic import row_sum, sigmoid

Total = Callable[[torch.Tensor], torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, total: Total = row_sum) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps), rounded to x's dtype, then times weight."""
    return _normed(x.float(), eps, total).to(x.dtype) * weight.to(x.dtype)


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
    normed = _normed(x.float(), eps, total) * weight.float()
    return (normed * sigmoid(gate.unflatten(-1, x.shape[1:]).float())).to(x.dtype).flatten(1)


def _normed(x32: torch.Tensor, eps: float, total: Total) -> torch.Tensor:
    return x32 * torch.rsqrt(total(x32.square()) / x32.shape[-1] + eps).unsqueeze(-1)
