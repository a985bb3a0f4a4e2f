"""One tile of the expert kernels, and the tiles of sorted runs of pairs, in the order of their table."""

import triton
import triton.language as tl

from anabranch.ops.experts.triton_products import (
    matrix,
    pair_product,
    product,
    sorted_tile,
    stacked_rows,
    tailed_product,
    unstack,
)
from anabranch.ops.glu.triton import activate
from anabranch.ops.mxfp4.triton import arranged_place


@triton.jit
def store_hidden(gate, up, h, place, inside, row0, inner, ARRANGED: tl.constexpr, SITU, BETA, LINEAR_BETA):
    """glu of [R, T] gate and up products, rounded first, to rows `place` of h, whose columns may be arranged."""
    dtype: tl.constexpr = h.dtype.element_ty
    row = row0 + tl.arange(0, gate.shape[0])
    value = activate(gate.to(dtype), up.to(dtype), SITU, BETA, LINEAR_BETA)
    column = arranged_place(row) if ARRANGED else row
    at = h + place.to(tl.int64)[None, :] * inner + column[:, None]
    tl.store(at, value, mask=inside[None, :] & (row < inner)[:, None])


@triton.jit
def gate_up_tile(
    x,
    weights,
    scales,
    order,
    h,
    place,
    inside,
    end,
    row0,
    inner,
    width,
    x_stride,
    MODE: tl.constexpr,
    FP4: tl.constexpr,
    H_ARRANGED: tl.constexpr,
    TOP_K: tl.constexpr,
    SITU: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    STACKED: tl.constexpr,
    TAIL: tl.constexpr,
    EVEN: tl.constexpr,
):
    """R rows of h of one expert's pairs at `place`, and of the TAIL behind them up to `end`."""
    dtype: tl.constexpr = h.dtype.element_ty
    pair = tl.load(order + place, mask=inside, other=0) if MODE == 0 else place
    if TAIL > 0:
        rest = tl.min(place, 0) + place.shape[0] + tl.arange(0, TAIL)
        left = rest < end
        other = tl.load(order + rest, mask=left, other=0)
        row = stacked_rows(row0, inner, R)
        most, more = tailed_product(
            *(weights, scales, width, row, x, pair // TOP_K, inside, other // TOP_K, left, x_stride),
            *(K, FP4, EVEN, dtype),
        )
        gate, up = unstack(more)
        store_hidden(gate, up, h, rest, left, row0, inner, H_ARRANGED, SITU, BETA, LINEAR_BETA)
        gate, up = unstack(most)
    else:
        gate, up = pair_product(
            *(weights, scales, width, row0, inner, x, pair // TOP_K, inside, x_stride, 0, width),
            *(R, K, STACKED, FP4, EVEN, dtype),
        )
    store_hidden(gate, up, h, place, inside, row0, inner, H_ARRANGED, SITU, BETA, LINEAR_BETA)


@triton.jit
def gate_up_sorted(
    x,
    w,
    scale,
    pairs,
    table,
    h,
    i,
    slots,
    inner,
    width,
    x_stride,
    FP4: tl.constexpr,
    H_ARRANGED: tl.constexpr,
    TOP_K: tl.constexpr,
    SITU: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    T: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    STACKED: tl.constexpr,
    TAIL: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The i-th piece of h in the order of the table: R rows for the pairs of one tile, of which the last has a tail."""
    blocks = tl.cdiv(inner, R)
    row0, slot = i % blocks * R, i // blocks
    expert, begin, held = sorted_tile(table, slot, slots)
    end, place = begin + held, begin + tl.arange(0, T)
    weights = matrix(w, expert, 2 * inner, width, 2 if FP4 else 1)
    scales = matrix(scale, expert, 2 * inner, width, 32 if FP4 else 1)
    if TAIL > 0 and held > T:
        gate_up_tile(
            *(x, weights, scales, pairs, h, place, place < end, end, row0, inner, width, x_stride),
            *(0, FP4, H_ARRANGED, TOP_K, SITU, BETA, LINEAR_BETA, R, K, STACKED, TAIL, EVEN),
        )
    if (held > 0) & (held <= T):
        gate_up_tile(
            *(x, weights, scales, pairs, h, place, place < end, end, row0, inner, width, x_stride),
            *(0, FP4, H_ARRANGED, TOP_K, SITU, BETA, LINEAR_BETA, R, K, STACKED, 0, EVEN),
        )


@triton.jit
def down_tile(
    h,
    weights,
    scales,
    order,
    out,
    place,
    inside,
    end,
    row,
    inner,
    width,
    MODE: tl.constexpr,
    FP4: tl.constexpr,
    K: tl.constexpr,
    TAIL: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The given rows of one expert's outputs for its pairs at `place`, and for the TAIL behind them up to `end`."""
    dtype: tl.constexpr = out.dtype.element_ty
    known = tl.minimum(row, width - 1)
    if TAIL > 0:
        rest = tl.min(place, 0) + place.shape[0] + tl.arange(0, TAIL)
        left = rest < end
        total, more = tailed_product(
            weights, scales, inner, known, h, place, inside, rest, left, inner, K, FP4, EVEN, dtype
        )
        pair = tl.load(order + rest, mask=left, other=0)
        at = out + pair.to(tl.int64)[None, :] * width + row[:, None]
        tl.store(at, more.to(dtype), mask=left[None, :] & (row < width)[:, None])
    else:
        total = product(weights, scales, inner, known, h, place, inside, 0, inner, K, FP4, EVEN, dtype)
    pair = tl.load(order + place, mask=inside, other=0) if MODE == 0 else place
    at = out + pair.to(tl.int64)[None, :] * width + row[:, None]
    tl.store(at, total.to(dtype), mask=inside[None, :] & (row < width)[:, None])


@triton.jit
def down_sorted(
    h,
    w,
    scale,
    pairs,
    table,
    out,
    i,
    slots,
    inner,
    width,
    FP4: tl.constexpr,
    T: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    TAIL: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The i-th piece of the output in the order of the table, as `gate_up_sorted` has it."""
    blocks = tl.cdiv(width, R)
    row, slot = i % blocks * R + tl.arange(0, R), i // blocks
    expert, begin, held = sorted_tile(table, slot, slots)
    end, place = begin + held, begin + tl.arange(0, T)
    weights = matrix(w, expert, width, inner, 2 if FP4 else 1)
    scales = matrix(scale, expert, width, inner, 32 if FP4 else 1)
    if TAIL > 0 and held > T:
        down_tile(*(h, weights, scales, pairs, out, place, place < end, end, row, inner, width, 0, FP4, K, TAIL, EVEN))
    if (held > 0) & (held <= T):
        down_tile(*(h, weights, scales, pairs, out, place, place < end, end, row, inner, width, 0, FP4, K, 0, EVEN))
