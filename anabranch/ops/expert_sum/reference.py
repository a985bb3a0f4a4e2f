"""The sum over experts in plain PyTorch. See spec.py for shapes."""

import torch


def expert_sum(
    out: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    first: int,
    count: int,
    y: torch.Tensor,
    shared: torch.Tensor | None = None,
) -> None:
    """Writes y."""
    (tokens, top_k), rows = experts.shape, torch.arange(len(experts), device=experts.device)
    order, total = experts.sort(dim=-1, stable=True).indices, torch.zeros(y.shape, device=y.device)
    for n in range(top_k):
        pick = order[:, n]
        expert = experts[rows, pick]
        local = (expert >= first) & (expert < first + count)
        part = out.unflatten(0, (tokens, top_k))[rows, pick].float() * weights[rows, pick, None]
        total = torch.where(local[:, None], total + part, total)
    value = total.to(y.dtype)
    y.copy_(value if shared is None else value + shared)
