"""The inner part of the convolution on the GPU: streams of tokens walked row by row, each row read once.

A program owns a piece of one segment and a block of channels. Its streams start RUN tokens apart; every step takes one
row of each, and the rows before it stay in registers, so that nothing is selected or looked up on the way. Four rows
are always on their way while four are worked on. Tiles are [stream, channel].
"""

# pyright: reportCallIssue=false, reportArgumentType=false
from typing import Any

import triton
import triton.language as tl
from triton import knobs

MOST_TAPS = 4


def native_asm() -> bool:
    """Whether kernels may hold PTX: not in the interpreter, and on NVIDIA GPUs only."""
    if knobs.runtime.interpret:
        return False
    target: Any = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda"


@triton.jit
def quick_sigmoid(x, ASM: tl.constexpr):
    """1 / (1 + exp(-x)) in fp32 by the two approximate instructions, each within two units in the last place."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{.reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000;"
            " rcp.approx.ftz.f32 $0, e;}",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x, ASM: tl.constexpr):
    """x * sigmoid(x) in fp32."""
    return x * quick_sigmoid(x, ASM)


@triton.jit
def mix(u3, u2, u1, u0, w3, w2, w1, w0, TAPS: tl.constexpr):
    """The taps' sum, oldest first, one rounding a tap; rows u are fp32 and row u_j is j tokens old."""
    if TAPS == 4:
        acc = tl.fma(u2, w2, u3 * w3)
        acc = tl.fma(u1, w1, acc)
    elif TAPS == 3:
        acc = tl.fma(u1, w1, u2 * w2)
    else:
        acc = u1 * w1
    return tl.fma(u0, w0, acc)


@triton.jit
def tap(weight, channel, inside, AGE: tl.constexpr, TAPS: tl.constexpr):
    """The weight [1, channel] of a row AGE tokens old."""
    if AGE < TAPS:
        return tl.load(weight + channel * TAPS + (TAPS - 1 - AGE), inside, other=0.0)[None, :]
    return tl.zeros_like(channel).to(tl.float32)[None, :]


@triton.jit
def piece_of(place, offsets, slots, T, B, steps, slot_stride, TILE: tl.constexpr):
    """(first token, start, end, slot) of a place in the grid; none of its tokens may be there.

    Segment b takes the places from offsets[b] // TILE + b on: at least as many as it has pieces of TILE tokens, so no
    host number is needed. What follows the last segment counts as one more, without a slot.
    """
    low, high = place * 0, place * 0 + B + 1
    for _ in range(steps):
        middle = (low + high) // 2
        right = tl.load(offsets + middle) // TILE + middle <= place
        low, high = tl.where(right, middle, low), tl.where(right, high, middle)
    start = tl.load(offsets + low)
    end = tl.load(offsets + low + 1, low < B, other=0)
    slot = tl.load(slots + low * slot_stride, low < B, other=-1)
    first = start + (place - start // TILE - low) * TILE
    return first, start, tl.where(low < B, end, T), slot


@triton.jit
def _row(at, i, read, inside):
    return tl.load(at, (i < read) & inside, other=0.0)


@triton.jit
def _before(
    AGE: tl.constexpr, x, past, t, start, read, channel, inside, x_stride, past_stride, TAPS: tl.constexpr
):  # fmt: skip
    """The row [stream, channel] AGE tokens before each stream's first: of x, or of the history, whose end is start."""
    p = (t - AGE)[:, None]
    old, new = (read > 0) & (p < start) & inside, (read > 0) & (p >= start) & inside
    kept = tl.load(past + (p - start + (TAPS - 1)) * past_stride + channel[None, :], old, other=0.0)
    fresh = tl.load(x + p * x_stride + channel[None, :], new, other=0.0)
    return tl.where(new, fresh, kept).to(tl.float32)


@triton.jit
def _emit(
    to, u3, u2, u1, u0, w3, w2, w1, w0, there, KIND: tl.constexpr, NORM: tl.constexpr, TAPS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """One row of each stream: rounded to KIND, then at unit length if NORM, to its place."""
    y = silu(mix(u3, u2, u1, u0, w3, w2, w1, w0, TAPS), ASM).to(KIND)
    if NORM:
        value = y.to(tl.float32)
        value = value * tl.rsqrt(tl.sum(value * value, 1) + 1e-6)[:, None]
        tl.store(to, value.to(to.dtype.element_ty), there)
    else:
        tl.store(to, y, there)


@triton.jit
def walk(
    x, past, weight, out, first, start, end, live, channel, inside, x_stride, past_stride, out_stride,
    TAPS: tl.constexpr, NORM: tl.constexpr, STREAMS: tl.constexpr, RUN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Convolve STREAMS x RUN tokens from `first` on, as far as `end`, of these channels [channel].

    x: row 0 of the raw rows. past: the slot's history. out: where row 0 of these channels goes, [channel] pointers.
    Without `live` nothing is read and the rows are zero.
    """
    KIND: tl.constexpr = x.dtype.element_ty
    t = first + tl.arange(0, STREAMS).to(tl.int64) * RUN
    count = tl.minimum(end - t, RUN).to(tl.int32)[:, None]
    read, wide = tl.where(live, count, 0), inside[None, :]
    w0, w1 = tap(weight, channel, inside, 0, TAPS), tap(weight, channel, inside, 1, TAPS)
    w2, w3 = tap(weight, channel, inside, 2, TAPS), tap(weight, channel, inside, 3, TAPS)
    row = x + (t * x_stride)[:, None] + channel[None, :]
    to = out[None, :] + (t * out_stride)[:, None]
    a, b = _row(row, 0, read, wide), _row(row + x_stride, 1, read, wide)
    c, d = _row(row + 2 * x_stride, 2, read, wide), _row(row + 3 * x_stride, 3, read, wide)
    u1 = _before(1, x, past, t, start, read, channel, wide, x_stride, past_stride, TAPS)
    u2, u3 = u1, u1
    if TAPS > 2:
        u2 = _before(2, x, past, t, start, read, channel, wide, x_stride, past_stride, TAPS)
    if TAPS > 3:
        u3 = _before(3, x, past, t, start, read, channel, wide, x_stride, past_stride, TAPS)
    longest = tl.minimum(end - first, RUN).to(tl.int32)  # that of the first stream
    for i in range(0, longest, 4):
        row += 4 * x_stride
        e, f = _row(row, i + 4, read, wide), _row(row + x_stride, i + 5, read, wide)
        g, h = _row(row + 2 * x_stride, i + 6, read, wide), _row(row + 3 * x_stride, i + 7, read, wide)
        v0, v1, v2, v3 = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)
        _emit(to, u3, u2, u1, v0, w3, w2, w1, w0, (i < count) & wide, KIND, NORM, TAPS, ASM)
        _emit(to + out_stride, u2, u1, v0, v1, w3, w2, w1, w0, (i + 1 < count) & wide, KIND, NORM, TAPS, ASM)
        _emit(to + 2 * out_stride, u1, v0, v1, v2, w3, w2, w1, w0, (i + 2 < count) & wide, KIND, NORM, TAPS, ASM)
        _emit(to + 3 * out_stride, v0, v1, v2, v3, w3, w2, w1, w0, (i + 3 < count) & wide, KIND, NORM, TAPS, ASM)
        u3, u2, u1 = v1, v2, v3
        a, b, c, d = e, f, g, h
        to += 4 * out_stride
