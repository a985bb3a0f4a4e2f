"""The router in plain PyTorch. See spec.py for shapes."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from anabranch.config.model import MoeConfig
from anabranch.ops.arithmetic import row_sum, sigmoid
from anabranch.ops.norm.reference import add_rms_norm, rms_norm


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    moe: MoeConfig,
    sync: torch.Tensor | None = None,
    linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.linear,
    total: Callable[[torch.Tensor], torch.Tensor] = row_sum,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose by score + bias (the lower index wins a tie), weigh by the unbiased score; `sync` is not used."""
    logits = linear(x.float(), weight.float())
    if moe.scoring == "sigmoid":
        scores = sigmoid(logits, total)
    else:
        raised = torch.exp(logits - logits.amax(-1, keepdim=True))
        scores = raised / total(raised).unsqueeze(-1)
    biased = _within_best_groups(scores + bias, moe)
    experts = torch.sort(biased, dim=-1, descending=True, stable=True).indices[:, : moe.top_k]
    weights = scores.gather(1, experts)
    if moe.renormalize and moe.top_k > 1:
        weights = weights / (total(weights).unsqueeze(-1) + 1e-20)
    return weights * moe.scaling, experts


def _within_best_groups(biased: torch.Tensor, moe: MoeConfig) -> torch.Tensor:
    if moe.groups == 1:
        return biased
    grouped = biased.unflatten(1, (moe.groups, -1))
    best = grouped.topk(2, -1).values.sum(-1).topk(moe.top_groups, -1).indices
    kept = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=biased.device).scatter_(1, best, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)


def norm_route(
    x: torch.Tensor,
    update: torch.Tensor | None,
    gain: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor,
    moe: MoeConfig,
    sync: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x + update, its norm, weights, experts), an operation at a time."""
    total, y = (x, rms_norm(x, gain, eps)) if update is None else add_rms_norm(x, update, gain, eps)
    return total, y, *route(y, weight, bias, moe, sync)
