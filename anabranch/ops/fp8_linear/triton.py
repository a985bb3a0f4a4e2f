"""The batch-invariant product with a block-FP8 weight: codes go to the matrix units as they are.

An E4M3 code is exact in bf16 and fp16, so 128 columns of codes times activations are summed first, in ascending order,
and their scale multiplies the sum once: no weight is rounded. The blocks of K lie in four fixed parts, summed as
((p0 + p1) + p2) + p3. Few tokens give each part to programs of its own, which keeps enough of the weight under way, and
a second launch adds the parts; more tokens add them in registers. So bits depend on a row of x, a row of W and K alone.
A tile of rows never leaves its scale block. See spec.py for shapes.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from anabranch.ops.early import early_launch, follow, prefetch_l2
from anabranch.ops.fp8_linear.reference import BLOCK
from anabranch.ops.fp8_linear.tile import PARTS, Tile, choose
from anabranch.ops.linear.triton import token_tile, weight_tile

ADDED = 1024  # elements of y that a program of the second launch adds
HEIGHT = 32  # rows that a program expands


@triton.jit
def _widened(codes, dtype: tl.constexpr):
    """Codes in the dtype of x, exactly; the direct way to bf16 would be an F2F instruction for each value."""
    if dtype == tl.bfloat16:
        return codes.to(tl.float16).to(tl.float32).to(tl.bfloat16)
    else:
        return codes.to(dtype)


@triton.jit(do_not_specialize=["tokens"])
def _fp8_linear(
    x,
    codes,
    scale,
    y,
    tokens,
    rows,
    columns,
    x_stride,
    scale_stride,
    T: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    B: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    AHEAD: tl.constexpr,
    EVEN: tl.constexpr,
    EARLY: tl.constexpr,
):
    token, row = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1) * R + tl.arange(0, R)
    inside, known = token < tokens, tl.minimum(row, rows - 1)
    scales, blocks = scale + (tl.program_id(1) * R // B) * scale_stride, tl.cdiv(columns, B)
    own = tl.program_id(2)
    if EARLY and AHEAD > 0:
        prefetch_l2(codes + known.to(tl.int64) * columns + blocks * own // PARTS * B, AHEAD)
    follow(EARLY)
    summed = tl.zeros((R, T), tl.float32)
    for part in range(own if SPLIT else 0, own + 1 if SPLIT else PARTS):
        total = tl.zeros((R, T), tl.float32)
        for block in range(blocks * part // PARTS, blocks * (part + 1) // PARTS):
            factor = tl.load(scales + block)
            inner = tl.zeros((R, T), tl.float32)
            for k in tl.static_range(0, B, K):
                a = _widened(weight_tile(codes, known, block * B + k, columns, columns, K, EVEN), x.dtype.element_ty)
                b = token_tile(x, token, inside, block * B + k, columns, x_stride, K, EVEN)
                inner = tl.dot(a, b, inner, input_precision="ieee")
            total = tl.fma(inner, factor, total)
        summed += total
    at = y + ((own * tokens if SPLIT else 0) + token).to(tl.int64)[None, :] * rows + row[:, None]
    tl.store(at, summed.to(y.dtype.element_ty), mask=inside[None, :] & (row < rows)[:, None])


@triton.jit(do_not_specialize=["size"])
def _add_parts(parts, y, size, N: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr):
    """y = ((p0 + p1) + p2) + p3, rounded once."""
    follow(EARLY)
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    mask = at < size
    summed = tl.load(parts + at, mask=mask)
    for part in tl.static_range(1, PARTS):
        summed += tl.load(parts + size.to(tl.int64) * part + at, mask=mask)
    tl.store(y + at, summed.to(y.dtype.element_ty), mask=mask)


def fp8_linear(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, tile: Tile | None = None) -> torch.Tensor:
    """y = x W^T: [T, K] and codes [N, K] under scale -> [T, N]; x may be a strided view. `tile` never changes a bit."""
    tokens, columns = x.shape
    rows = codes.shape[0]
    y = torch.empty((tokens, rows), dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    tile = tile or choose(tokens, rows, x.dtype)
    grid = (triton.cdiv(tokens, tile.T), triton.cdiv(rows, tile.R), PARTS if tile.split else 1)
    out = torch.empty((PARTS, *y.shape), dtype=torch.float32, device=x.device) if tile.split else y
    early: dict[str, Any] = early_launch()
    even = columns % BLOCK == 0
    # bytes of each row that go to L2 while the kernel before still runs: what the first loads will ask for
    ahead = BLOCK * min(tile.stages, columns // BLOCK // PARTS) if tile.split and even else 0
    _fp8_linear[grid](
        *(x, codes, scale, out, tokens, rows, columns, x.stride(0), scale.stride(0)),
        **{"T": tile.T, "R": tile.R, "K": tile.K, "B": BLOCK, "PARTS": PARTS, "SPLIT": tile.split, "AHEAD": ahead},
        **{"EVEN": even, "num_warps": tile.warps, "num_stages": tile.stages, **early},
    )
    if tile.split:
        _add_parts[(triton.cdiv(y.numel(), ADDED),)](out, y, y.numel(), N=ADDED, PARTS=PARTS, **early)
    return y


@triton.jit
def _expand(codes, scale, w, rows, columns, scale_stride, R: tl.constexpr, B: tl.constexpr, EARLY: tl.constexpr):
    follow(EARLY)
    row, column = tl.program_id(1) * R + tl.arange(0, R), tl.program_id(0) * B + tl.arange(0, B)
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    factor = tl.load(scale + (tl.program_id(1) * R // B) * scale_stride + tl.program_id(0))
    values = tl.load(codes + at, mask=inside, other=0.0).to(tl.float16).to(tl.float32)
    tl.store(w + at, (values * factor).to(w.dtype.element_ty), mask=inside)


def expand(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The weight itself, [N, K]: codes times scales in fp32, rounded once. Row 0 starts a scale block."""
    rows, columns = codes.shape
    w = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    if w.numel():
        grid = (triton.cdiv(columns, BLOCK), triton.cdiv(rows, HEIGHT))
        constants: dict[str, Any] = {"R": HEIGHT, "B": BLOCK, **early_launch()}
        _expand[grid](codes, scale, w, rows, columns, scale.stride(0), **constants)
    return w
