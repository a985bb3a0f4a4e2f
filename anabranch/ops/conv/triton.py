"""The short convolution on the GPU. Elementwise: a value's bits depend on its own taps alone.

Prompts take two launches, because the first tokens of a segment read the history that its last tokens replace; when
every segment is one token, the program that reads a history also owns it, and one launch does both.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
import torch
import triton
import triton.language as tl

from anabranch.ops.conv.tile import PLAIN, Tile
from anabranch.ops.conv.triton_walk import MOST_TAPS, mix, native_asm, piece_of, silu, tap, walk
from anabranch.ops.early import early_launch, follow
from anabranch.ops.segments import Segments

ROWS, CHANNELS, WARPS = 4, 256, 4
COLUMNS = 128  # channels of a program that walks


def conv(
    x: torch.Tensor,
    segments: Segments,
    slots: torch.Tensor,
    pool: torch.Tensor,
    weight: torch.Tensor,
    tile: Tile = PLAIN,
) -> torch.Tensor:
    """See spec.py; 2 to 4 taps.

    Raises:
        ValueError: another number of taps.
    """
    tokens, channels = x.shape
    count, taps = len(segments), taps_of(weight)
    y = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    if max(segments.lengths) == 1 and tokens == count:
        grid = (triton.cdiv(channels, CHANNELS), triton.cdiv(tokens, ROWS))
        strides = (channels, x.stride(0), slots.stride(0), pool.stride(0))
        block = {"ROWS": ROWS, "CHANNELS": CHANNELS, "num_warps": WARPS, "enable_fp_fusion": False}
        _step[grid](x, slots, pool, weight, y, tokens, *strides, TAPS=taps, ASM=native_asm(), **block)
        return y
    _convolve[(triton.cdiv(channels, COLUMNS), places(tokens, count, tile))](
        *(x, segments.offsets, slots, pool, weight, y),
        *(tokens, count, (count + 1).bit_length(), channels, x.stride(0), slots.stride(0), pool.stride(0)),
        TAPS=taps,
        COLUMNS=COLUMNS,
        **walked(tile),
    )
    replace_history(x, segments, slots, pool, taps)
    return y


def taps_of(weight: torch.Tensor) -> int:
    """The number of taps, if the kernels take it.

    Raises:
        ValueError: it is not 2 to 4.
    """
    taps = weight.shape[1]
    if not 2 <= taps <= MOST_TAPS:
        raise ValueError(f"conv: the weight has {taps} taps, accepted are 2 to {MOST_TAPS}")
    return taps


def places(tokens: int, segments: int, tile: Tile) -> int:
    """Pieces of a tile's tokens that any cut of the tokens into so many segments and padding may have."""
    return tokens // tile.tokens + segments + 1


def walked(tile: Tile) -> dict[str, int | bool]:
    """Launch options of a kernel that walks."""
    # contracting a multiply-add in one of the kernels only would show in the bits
    shape = {"STREAMS": tile.streams, "RUN": tile.run, "num_warps": tile.warps}
    return {**shape, "ASM": native_asm(), "enable_fp_fusion": False}


def replace_history(x: torch.Tensor, segments: Segments, slots: torch.Tensor, pool: torch.Tensor, taps: int) -> None:
    """The second launch alone: every slot's window becomes its segment's last raw rows."""
    channels, count = x.shape[1], len(segments)
    grid = (triton.cdiv(channels, CHANNELS), triton.cdiv(count, ROWS))
    numbers = (count, channels, x.stride(0), slots.stride(0), pool.stride(0))
    block = {"TAPS": taps, "ROWS": ROWS, "CHANNELS": CHANNELS, "num_warps": WARPS, **early_launch()}
    _replace_history[grid](x, segments.offsets, slots, pool, *numbers, **block)


def save_rows(x: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor, pool: torch.Tensor) -> None:
    """The K-1 raw rows before each of `ends` go to a slot. See CONV_SAVE in spec.py."""
    channels = x.shape[1]
    grid = (triton.cdiv(channels, CHANNELS), len(slots))
    strides = (channels, x.stride(0), pool.stride(0))
    _save_rows[grid](x, slots, ends, pool, *strides, KEPT=pool.shape[1], CHANNELS=CHANNELS, num_warps=WARPS)


@triton.jit
def _save_rows(x, slots, ends, pool, C, x_stride, pool_pitch, KEPT: tl.constexpr, CHANNELS: tl.constexpr):
    """One row of programs a window."""
    c, n = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS), tl.program_id(1)
    slot = tl.load(slots + n)
    if slot >= 0:
        first = tl.load(ends + n) - KEPT
        for i in tl.static_range(KEPT):
            row = tl.load(x + (first + i) * x_stride + c, c < C)
            tl.store(pool + slot * pool_pitch + i * C + c, row, c < C)


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


@triton.jit(do_not_specialize=["T", "slot_stride"])
def _step(
    x,
    slots,
    pool,
    weight,
    y,
    T,
    C,
    x_stride,
    slot_stride,
    pool_pitch,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ASM: tl.constexpr,
):
    """One token of each slot, and its window moved on. Tiles are [row, channel]."""
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    t = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = t < T
    t = tl.minimum(t, T - 1)
    slot = tl.load(slots + t * slot_stride)
    live = there & (slot >= 0)
    inside = live[:, None] & (c < C)[None, :]
    past = pool + (slot * pool_pitch)[:, None] + c[None, :]
    u0 = tl.load(x + (t * x_stride)[:, None] + c[None, :], inside, other=0.0).to(tl.float32)
    u1 = tl.load(past + (TAPS - 2) * C, inside, other=0.0).to(tl.float32)
    u2, u3 = u1, u1
    if TAPS > 2:
        u2 = tl.load(past + (TAPS - 3) * C, inside, other=0.0).to(tl.float32)
    if TAPS > 3:
        u3 = tl.load(past + (TAPS - 4) * C, inside, other=0.0).to(tl.float32)
    w0, w1 = tap(weight, c, c < C, 0, TAPS), tap(weight, c, c < C, 1, TAPS)
    w2, w3 = tap(weight, c, c < C, 2, TAPS), tap(weight, c, c < C, 3, TAPS)
    acc = silu(mix(u3, u2, u1, u0, w3, w2, w1, w0, TAPS), ASM)
    tl.store(y + t[:, None] * C + c[None, :], acc.to(y.dtype.element_ty), there[:, None] & (c < C)[None, :])
    _keep(x, pool, t, t + 1, slot, live, c, x_stride, pool_pitch, C, TAPS)


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
    TAPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STREAMS: tl.constexpr,
    RUN: tl.constexpr,
    ASM: tl.constexpr,
):
    place = tl.program_id(1).to(tl.int64)
    first, start, end, slot = piece_of(place, offsets, slots, T, B, steps, slot_stride, STREAMS * RUN)
    if first < end:
        c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        past = pool + slot * pool_pitch
        walk(
            x, past, weight, y + c, first, start, end, slot >= 0, c, c < C, x_stride, C, C, TAPS, False,
            STREAMS, RUN, ASM,
        )  # fmt: skip


@triton.jit(do_not_specialize=["B", "slot_stride"])
def _replace_history(
    x,
    offsets,
    slots,
    pool,
    B,
    C,
    x_stride,
    slot_stride,
    pool_pitch,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One row of programs a ROWS segments."""
    follow(EARLY)
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    b = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = b < B
    b = tl.minimum(b, B - 1)
    slot = tl.load(slots + b * slot_stride)
    start, end = tl.load(offsets + b), tl.load(offsets + b + 1)
    _keep(x, pool, start, end, slot, there & (slot >= 0), c, x_stride, pool_pitch, C, TAPS)
