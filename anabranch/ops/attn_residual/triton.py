"""The residual read as one Triton launch: one program a token, the rows read twice (the second time from cache).

See spec.py for shapes.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from anabranch.ops.gate.triton import exp32
from anabranch.ops.norm.triton import fixed_layout

_MIX = 2048  # columns of the mixture held at once; whole rows would spill


@triton.jit
def _residual_read(
    rows,
    strides,
    norm,
    score,
    y,
    width,
    eps,
    COUNT: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    MIX: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    direction = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    direction *= tl.load(score + column, mask=inside, other=0.0).to(tl.float32)
    slot = tl.arange(0, SLOTS)
    logits = tl.full((SLOTS,), float("-inf"), tl.float32)
    for j in tl.static_range(COUNT):
        row = tl.load(rows[j] + token * strides[j] + column, mask=inside, other=0.0).to(tl.float32)
        logit = tl.sum(row * direction, 0) * tl.rsqrt(tl.sum(row * row, 0) / width + eps)
        logits = tl.where(slot == j, logit, logits)
    raised = exp32(logits - tl.max(logits, 0))
    p = raised / tl.sum(raised, 0)
    for start in range(0, width, MIX):
        c = start + tl.arange(0, MIX)
        mixed = tl.zeros((MIX,), tl.float32)
        for j in tl.static_range(COUNT):
            part = tl.load(rows[j] + token * strides[j] + c, mask=c < width, other=0.0)
            mixed += tl.sum(tl.where(slot == j, p, 0.0), 0) * part.to(tl.float32)
        tl.store(y + token * width + c, mixed.to(y.dtype.element_ty), mask=c < width)


def residual_read(
    prefix: torch.Tensor, bank: Sequence[torch.Tensor], norm: torch.Tensor, score: torch.Tensor, eps: float
) -> torch.Tensor:
    """sum_j softmax_j(score . RMS(row_j)) * row_j over the banked rows and the prefix: [T, W]."""
    if not bank:
        return prefix
    tokens, width = prefix.shape
    rows = tuple(fixed_layout(row) for row in (*bank, prefix))
    y = torch.empty((tokens, width), dtype=prefix.dtype, device=prefix.device)
    if tokens:
        strides = tuple(row.stride(0) for row in rows)
        blocks = {"SLOTS": triton.next_power_of_2(len(rows)), "BLOCK": triton.next_power_of_2(width), "MIX": _MIX}
        sizes = (norm, score, y, width, eps)
        _residual_read[(tokens,)](rows, strides, *sizes, COUNT=len(rows), **blocks, num_warps=16)
    return y
