"""The residual read in plain PyTorch. See spec.py for shapes."""

from collections.abc import Sequence

import torch

from anabranch.ops.arithmetic import Total, row_sum, softmax, unit_rms
from anabranch.ops.norm.reference import rms_norm


def residual_read(
    prefix: torch.Tensor,
    bank: Sequence[torch.Tensor],
    norm: torch.Tensor,
    score: torch.Tensor,
    eps: float,
    total: Total = row_sum,
) -> torch.Tensor:
    """sum_j softmax_j(score . RMS(row_j)) * row_j over the banked rows and the prefix."""
    if not bank:
        return prefix
    rows = torch.stack([*bank, prefix], 1).float()
    logits = total(unit_rms(rows, eps, total) * (norm.float() * score.float()))
    p = softmax(logits, total)
    return total((p.unsqueeze(-1) * rows).mT).type_as(prefix)


def residual_norm(
    prefix: torch.Tensor,
    update: torch.Tensor | None,
    bank: Sequence[torch.Tensor],
    norm: torch.Tensor,
    score: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    total: Total = row_sum,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(prefix + update, rms_norm of the read that the sum takes part in), each step rounded to the model dtype."""
    summed = prefix if update is None else prefix + update
    return summed, rms_norm(residual_read(summed, bank, norm, score, eps, total), weight, eps, total)
