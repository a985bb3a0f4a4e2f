"""The short convolution in plain PyTorch: prefill segments and decode tokens alike. See spec.py for shapes."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def conv(
    x: torch.Tensor, lengths: Sequence[int], slots: torch.Tensor, pool: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """y[t] = silu(sum_j weight[:, j] * u[t - (K-1) + j]) per channel, u continuing each slot's history."""
    history = weight.shape[1] - 1
    live = slots >= 0
    past = torch.where(live[:, None, None], pool[slots.clamp_min(0)], 0).to(x.dtype)
    segments = zip(past, x.split(list(lengths)), strict=True)
    padded = torch.cat([part for pair in segments for part in pair])

    counts = torch.tensor(lengths, device=x.device)
    segment_of = torch.repeat_interleave(torch.arange(len(lengths), device=x.device), counts)
    first = torch.arange(x.shape[0], device=x.device) + history * segment_of
    acc = padded[first].float() * weight[:, 0]
    for tap in range(1, history + 1):
        acc = acc + padded[first + tap].float() * weight[:, tap]
    y = torch.where(live[segment_of, None], F.silu(acc), 0).to(x.dtype)

    # in `padded` every segment ends with its newest row, whatever its length
    ends = counts.cumsum(0) + history * torch.arange(1, len(lengths) + 1, device=x.device)
    newest = padded[ends[live, None] + torch.arange(-history, 0, device=x.device)]
    pool[slots[live]] = newest.to(pool.dtype)
    return y
