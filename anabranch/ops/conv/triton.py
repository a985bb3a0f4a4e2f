"""The short convolution on the GPU. Elementwise: a value's bits depend on its own taps alone.

Two launches, because the first tokens of a segment read the history that its last tokens replace; when every segment
is one token, the program that reads a history also owns it, and one launch does both. Tiles are [row, channel].
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
import torch
import triton
import triton.language as tl

from anabranch.ops.segments import Segments

ROWS, CHANNELS, WARPS = 4, 256, 4


def conv(
    x: torch.Tensor, segments: Segments, slots: torch.Tensor, pool: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """See spec.py."""
    tokens, channels = x.shape
    count, taps = len(segments), weight.shape[1]
    y = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    single = max(segments.lengths) == 1 and tokens == count
    tensors = (x, segments.offsets, slots, pool, weight, y)
    numbers = (tokens, count, count.bit_length(), channels, x.stride(0), slots.stride(0), pool.stride(0))
    # contracting a multiply-add in one of the kernels only would show in the bits
    tile = {"TAPS": taps, "ROWS": ROWS, "CHANNELS": CHANNELS, "num_warps": WARPS, "enable_fp_fusion": False}
    columns = triton.cdiv(channels, CHANNELS)
    _convolve[(columns, triton.cdiv(tokens, ROWS))](*tensors, *numbers, SINGLE=single, **tile)
    if not single:
        _replace_history[(columns, triton.cdiv(count, ROWS))](*tensors, *numbers, **tile)
    return y


def replace_history(x: torch.Tensor, segments: Segments, slots: torch.Tensor, pool: torch.Tensor, taps: int) -> None:
    """The second launch alone: every slot's window becomes its segment's last raw rows."""
    (tokens, channels), count = x.shape, len(segments)
    numbers = (tokens, count, count.bit_length(), channels, x.stride(0), slots.stride(0), pool.stride(0))
    tile = {"TAPS": taps, "ROWS": ROWS, "CHANNELS": CHANNELS, "num_warps": WARPS, "enable_fp_fusion": False}
    grid = (triton.cdiv(channels, CHANNELS), triton.cdiv(count, ROWS))
    _replace_history[grid](x, segments.offsets, slots, pool, x, x, *numbers, **tile)


@triton.jit
def _segment_of(t, offsets, count, steps):
    """The segment that holds token t [row]: the last one that starts at or before it, by bisection."""
    low, high = t * 0, t * 0 + count
    for _ in range(steps):
        middle = (low + high) // 2
        right = tl.load(offsets + middle) <= t
        low, high = tl.where(right, middle, low), tl.where(right, high, middle)
    return low


@triton.jit
def _keep(x, pool, start, end, slot, live, c, x_stride, pool_pitch, C, TAPS: tl.constexpr):
    """Write the last TAPS-1 rows of (history, segment) over the history. All of start, end, slot, live are [row]."""
    inside = live[:, None] & (c < C)[None, :]
    row = pool + slot[:, None] * pool_pitch + c[None, :]
    for i in tl.static_range(TAPS - 1):
        p = end - (TAPS - 1) + i
        old = inside & (p < start)[:, None]
        new = inside & (p >= start)[:, None]
        kept = tl.load(row + (end - start + i)[:, None] * C, old, other=0.0)
        fresh = tl.load(x + p[:, None] * x_stride + c[None, :], new, other=0.0)
        # rows move down only; no thread may store this one before every thread has read it
        tl.debug_barrier()
        tl.store(row + i * C, tl.where(new, fresh, kept), inside)


@triton.jit(do_not_specialize=["T", "B", "steps", "slot_stride"])
def _convolve(
    x,
    offsets,
    slots,
    pool,
    weight,
    y,
    T,
    B,
    steps,
    C,
    x_stride,
    slot_stride,
    pool_pitch,
    SINGLE: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    t = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = t < T
    t = tl.minimum(t, T - 1)
    if SINGLE:
        segment, start = t, t
    else:
        segment = _segment_of(t, offsets, B, steps)
        start = tl.load(offsets + segment)
    slot = tl.load(slots + segment * slot_stride)
    live = there & (slot >= 0)
    inside = live[:, None] & (c < C)[None, :]
    acc = tl.zeros([ROWS, CHANNELS], tl.float32)
    for tap in tl.static_range(TAPS):
        p = t - (TAPS - 1) + tap
        old, new = inside & (p < start)[:, None], inside & (p >= start)[:, None]
        past = tl.load(pool + (slot * pool_pitch + (p - start + TAPS - 1) * C)[:, None] + c[None, :], old, other=0.0)
        u = tl.load(x + (p * x_stride)[:, None] + c[None, :], new, other=0.0)
        w = tl.load(weight + c * TAPS + tap, c < C, other=0.0)
        acc = acc + tl.where(new, u, past).to(tl.float32) * w[None, :]
    acc = acc / (1.0 + tl.exp(-acc))
    acc = tl.where(live[:, None], acc, 0.0)
    tl.store(y + t[:, None] * C + c[None, :], acc.to(y.dtype.element_ty), there[:, None] & (c < C)[None, :])
    if SINGLE:
        _keep(x, pool, t, t + 1, slot, live, c, x_stride, pool_pitch, C, TAPS)


@triton.jit(do_not_specialize=["T", "B", "steps", "slot_stride"])
def _replace_history(
    x,
    offsets,
    slots,
    pool,
    weight,
    y,
    T,
    B,
    steps,
    C,
    x_stride,
    slot_stride,
    pool_pitch,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """One row of programs a ROWS segments; the signature is that of _convolve."""
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    b = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = b < B
    b = tl.minimum(b, B - 1)
    slot = tl.load(slots + b * slot_stride)
    start, end = tl.load(offsets + b), tl.load(offsets + b + 1)
    _keep(x, pool, start, end, slot, there & (slot >= 0), c, x_stride, pool_pitch, C, TAPS)
