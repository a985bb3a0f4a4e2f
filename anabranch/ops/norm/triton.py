"""Norms as one Triton launch each. A row is reduced inside one program, so its bits do not depend on the batch.

See spec.py for shapes.
"""

import torch
import triton
import triton.language as tl

from anabranch.ops.conv.triton_walk import native_asm, quick_sigmoid
from anabranch.ops.early import ahead, behind, early_launch, follow

_HEADS = 16  # (token, head) rows of one program of the per-head norms


def fixed_layout(x: torch.Tensor) -> torch.Tensor:
    """x itself where Triton compiles its aligned binary, else a dense copy.

    Alignment decides how a row is spread over threads, and with it the order of a sum: equal rows must meet one binary
    wherever they lie.
    """
    steps = (x.data_ptr(), x.shape[-1], *x.stride()[:-1])
    return x if all(step % 16 == 0 for step in steps) else x.clone(memory_format=torch.contiguous_format)


@triton.jit
def _rms_norm(
    x, update, weight, total, y, width, x_stride, update_stride, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # the projection behind takes its place and fetches weights while this still waits
    ahead(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    w = tl.load(weight + column, mask=inside, other=0.0).to(y.dtype.element_ty).to(tl.float32)
    behind(EARLY)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    value32 = value.to(tl.float32)
    if ADD:
        value32 += tl.load(update + row * update_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value32.to(value.dtype)
        tl.store(total + row * width + column, rounded, mask=inside)
        value32 = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value32 * value32, 0) / width + eps)
    normed = (value32 * scale).to(value.dtype).to(tl.float32)
    tl.store(y + row * width + column, (normed * w).to(value.dtype), mask=inside)


def _launch_rms_norm(
    x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, total: torch.Tensor, eps: float, add: bool
) -> torch.Tensor:
    x, update = fixed_layout(x), fixed_layout(update) if add else x
    rows, width = x.shape
    y = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        warps = max(1, min(8, block // 512))
        strides = (x.stride(0), update.stride(0))
        options = {"ADD": add, "BLOCK": block, "num_warps": warps} | early_launch(add)
        _rms_norm[(rows,)](x, update, weight, total, y, width, *strides, eps, **options)
    return y


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps), rounded to x's dtype, then times weight: [T, W].

    Launched plainly, behind everything before it: early reads of a pass rest on its first norm (ops/early.py).
    """
    return _launch_rms_norm(x, x, weight, x, eps, add=False)


def add_rms_norm(
    x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + update, rms_norm(x + update)) in one launch; the sum is rounded to x's dtype before it is normed."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return total, _launch_rms_norm(x, update, weight, total, eps, add=True)


@triton.jit
def _places(rows, heads, dim, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Token, head, column and mask of a program's tile of (token, head) rows."""
    row = tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)[None, :]
    return (row // heads)[:, None], (row % heads)[:, None], column, (row < rows)[:, None] & (column < dim)


@triton.jit(do_not_specialize=["rows"])
def _l2_norm(x, y, rows, heads, dim, t_stride, h_stride, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    token, head, column, inside = _places(rows, heads, dim, HEADS, BLOCK)
    value = tl.load(x + token * t_stride + head * h_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) + 1e-6)
    tl.store(y + (token * heads + head) * dim + column, value * scale[:, None], mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _gated_rms_norm(
    x, gate, weight, y, rows, dim, t_stride, h_stride, gate_stride, eps,
    H: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, ASM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    token, head, column, inside = _places(rows, H, dim, HEADS, BLOCK)
    # nothing reads either again: the second-level cache is for y
    value = tl.load(x + token * t_stride + head * h_stride + column, inside, other=0.0, eviction_policy="evict_first")
    g = tl.load(gate + token * gate_stride + head * dim + column, inside, other=0.0, eviction_policy="evict_first")
    w = tl.load(weight + column, mask=column < dim, other=0.0).to(tl.float32)
    value32 = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value32 * value32, 1) / dim + eps)
    gated = value32 * scale[:, None] * w * quick_sigmoid(g.to(tl.float32), ASM)
    tl.store(y + (token * H + head) * dim + column, gated.to(value.dtype), mask=inside)


def l2_norm(x: torch.Tensor) -> torch.Tensor:
    """Per head unit length in fp32, eps 1e-6 added to the sum of squares: [T, H, D] -> fp32 [T, H, D]."""
    x = fixed_layout(x)
    tokens, heads, dim = x.shape
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if x.numel():
        sizes = (tokens * heads, heads, dim, x.stride(0), x.stride(1))
        grid, block = (triton.cdiv(tokens * heads, _HEADS),), triton.next_power_of_2(dim)
        _l2_norm[grid](x, y, *sizes, HEADS=_HEADS, BLOCK=block, num_warps=4)
    return y


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over each head's channels times weight times sigmoid(gate): [T, H, D] -> [T, H*D]."""
    x, gate = fixed_layout(x), fixed_layout(gate)
    tokens, heads, dim = x.shape
    y = torch.empty((tokens, heads * dim), dtype=x.dtype, device=x.device)
    if x.numel():
        sizes = (tokens * heads, dim, x.stride(0), x.stride(1), gate.stride(0))
        grid, block = (triton.cdiv(tokens * heads, _HEADS),), triton.next_power_of_2(dim)
        options = {"ASM": native_asm(), "num_warps": 4, **early_launch()}
        _gated_rms_norm[grid](x, gate, weight, y, *sizes, eps, H=heads, HEADS=_HEADS, BLOCK=block, **options)
    return y
