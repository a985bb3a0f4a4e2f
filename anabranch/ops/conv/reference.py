"""The short convolution in plain PyTorch: prefill segments and decode tokens alike. See spec.py for shapes."""

import torch

from anabranch.ops.arithmetic import silu
from anabranch.ops.segments import Segments


def conv(
    x: torch.Tensor, segments: Segments, slots: torch.Tensor, pool: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """y[t] = silu(sum_j weight[:, j] * u[t - (K-1) + j]) per channel, u continuing each slot's history."""
    if segments.lengths == (1,) * len(x) and -1 not in slots.tolist():
        return _tokens(x, slots, pool, weight)
    history = weight.shape[1] - 1
    live = slots >= 0
    past = torch.where(live[:, None, None], pool[slots.clamp_min(0)], 0).to(x.dtype)
    parts = zip(past, x.split(list(segments.lengths)), strict=True)
    padded = torch.cat([part for pair in parts for part in pair])

    index = torch.arange(len(segments), device=x.device)
    segment_of = torch.repeat_interleave(index, segments.offsets.diff(), output_size=x.shape[0])
    first = torch.arange(x.shape[0], device=x.device) + history * segment_of
    acc = padded[first].float() * weight[:, 0]
    for tap in range(1, history + 1):
        acc = acc + padded[first + tap].float() * weight[:, tap]
    y = torch.where(live[segment_of, None], silu(acc), 0).to(x.dtype)

    # in `padded` every segment ends with its newest row, whatever its length
    ends = segments.offsets[1:] + history * (index + 1)
    newest = padded[ends[live, None] + torch.arange(-history, 0, device=x.device)]
    pool[slots[live]] = newest.to(pool.dtype)
    return y


def save_rows(x: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor, pool: torch.Tensor) -> None:
    """The K-1 raw rows before each of `ends` go to a slot. See CONV_SAVE in spec.py."""
    live = slots >= 0
    rows = ends[live, None] + torch.arange(-pool.shape[1], 0, device=x.device)
    pool[slots[live]] = x[rows].to(pool.dtype)


def _tokens(x: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same for one token of every slot, in fewer steps."""
    window = torch.cat([pool.index_select(0, slots).type_as(x), x.unsqueeze(1)], 1)
    pool.index_copy_(0, slots, window[:, 1:].type_as(pool))
    first, *others = (window.float() * weight.T).unbind(1)
    return silu(sum(others, first)).type_as(x)
