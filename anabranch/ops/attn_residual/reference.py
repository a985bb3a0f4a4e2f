"""The residual read in plain PyTorch. See spec.py for shapes."""

from collections.abc import Sequence

import torch


def residual_read(
    prefix: torch.Tensor, bank: Sequence[torch.Tensor], norm: torch.Tensor, score: torch.Tensor, eps: float
) -> torch.Tensor:
    """sum_j softmax_j(score . RMS(row_j)) * row_j over the banked rows and the prefix."""
    if not bank:
        return prefix
    rows = torch.stack([*bank, prefix], 1).float()
    direction = norm.float() * score.float().flatten()
    logits = (rows * direction).sum(-1) * torch.rsqrt(rows.square().mean(-1) + eps)
    return torch.einsum("tn,tnw->tw", torch.softmax(logits, -1), rows).to(prefix.dtype)
