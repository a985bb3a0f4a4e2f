"""The router in plain PyTorch. See spec.py for shapes."""

import torch
import torch.nn.functional as F

from anabranch.config.model import MoeConfig


def route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, moe: MoeConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose by score + bias, weigh by the unbiased score."""
    logits = F.linear(x.float(), weight.float())
    scores = torch.sigmoid(logits) if moe.scoring == "sigmoid" else torch.softmax(logits, -1)
    experts = _within_best_groups(scores + bias, moe).topk(moe.top_k, -1).indices
    weights = scores.gather(1, experts)
    if moe.renormalize and moe.top_k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * moe.scaling, experts


def _within_best_groups(biased: torch.Tensor, moe: MoeConfig) -> torch.Tensor:
    if moe.groups == 1:
        return biased
    grouped = biased.unflatten(1, (moe.groups, -1))
    best = grouped.topk(2, -1).values.sum(-1).topk(moe.top_groups, -1).indices
    kept = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=biased.device).scatter_(1, best, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
