"""Residual add, read and norm as one Triton launch: one program a token, its rows read twice, then from cache.

See spec.py for shapes.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from anabranch.ops.early import ahead, behind, early_launch
from anabranch.ops.gate.triton import exp32
from anabranch.ops.norm.triton import add_rms_norm, fixed_layout, rms_norm


@triton.jit
def _residual_norm(
    rows,
    strides,
    update,
    update_stride,
    total,
    norm,
    score,
    weight,
    y,
    width,
    eps,
    COUNT: tl.constexpr,
    SLOTS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    ahead(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    direction = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    direction *= tl.load(score + column, mask=inside, other=0.0).to(tl.float32)
    behind(EARLY)
    newest = tl.load(rows[COUNT - 1] + token * strides[COUNT - 1] + column, mask=inside, other=0.0)
    if ADD:
        newest32 = newest.to(tl.float32)
        newest32 += tl.load(update + token * update_stride + column, mask=inside, other=0.0).to(tl.float32)
        newest = newest32.to(newest.dtype)
        tl.store(total + token * width + column, newest, mask=inside)
    slot = tl.arange(0, SLOTS)
    logits = tl.full((SLOTS,), float("-inf"), tl.float32)
    for j in tl.static_range(COUNT):
        if j == COUNT - 1:
            row = newest.to(tl.float32)
        else:
            row = tl.load(rows[j] + token * strides[j] + column, mask=inside, other=0.0).to(tl.float32)
        logit = tl.sum(row * direction, 0) * tl.rsqrt(tl.sum(row * row, 0) / width + eps)
        logits = tl.where(slot == j, logit, logits)
    raised = exp32(logits - tl.max(logits, 0))
    p = raised / tl.sum(raised, 0)
    tl.debug_barrier()  # the rows are read again: kept in registers, nine of them would spill
    mixed = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(COUNT):
        if j == COUNT - 1:
            row = newest.to(tl.float32)
        else:
            row = tl.load(rows[j] + token * strides[j] + column, mask=inside, other=0.0).to(tl.float32)
        mixed += tl.sum(tl.where(slot == j, p, 0.0), 0) * row
    read = mixed.to(y.dtype.element_ty).to(tl.float32)
    scale = tl.rsqrt(tl.sum(read * read, 0) / width + eps)
    normed = (read * scale).to(y.dtype.element_ty).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + token * width + column, (normed * w).to(y.dtype.element_ty), mask=inside)


def residual_norm(
    prefix: torch.Tensor,
    update: torch.Tensor | None,
    bank: Sequence[torch.Tensor],
    norm: torch.Tensor,
    score: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(prefix + update, rms_norm of the mixture of the banked rows and that sum): [T, W] each."""
    if not bank:
        return (prefix, rms_norm(prefix, weight, eps)) if update is None else add_rms_norm(prefix, update, weight, eps)
    tokens, width = prefix.shape
    rows = tuple(fixed_layout(row) for row in (*bank, prefix))
    added = fixed_layout(prefix if update is None else update)
    y = torch.empty((tokens, width), dtype=prefix.dtype, device=prefix.device)
    total = prefix if update is None else torch.empty_like(y)
    if tokens:
        strides = tuple(row.stride(0) for row in rows)
        blocks = {"SLOTS": triton.next_power_of_2(len(rows)), "BLOCK": triton.next_power_of_2(width)}
        sums = (added, added.stride(0), total)
        _residual_norm[(tokens,)](
            *(rows, strides, *sums, norm, score, weight, y, width, eps),
            COUNT=len(rows),
            ADD=update is not None,
            **blocks,
            **early_launch(update is not None),  # without one it may be the first of a pass, as in ops/norm
            num_warps=16,
        )
    return total, y
