"""The producer layouts on the GPU: each raw row is read once and leaves as dense q, k and v. See spec.py for shapes.

One program walks (ops/conv/triton_walk.py) a piece of a segment in one head of q, k or v, so a norm never leaves its
program; the last columns of programs do beta, ROWS tokens each. Nothing that varies with the batch is specialised on: a
row's bits are its own.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
import torch
import triton
import triton.language as tl

from anabranch.ops.conv.tile import TILE, Tile
from anabranch.ops.conv.triton import places, replace_history, taps_of, walked
from anabranch.ops.conv.triton_walk import piece_of, walk
from anabranch.ops.kda_decode.triton import aligned_rows
from anabranch.ops.kda_inputs.spec import Layout, width_of
from anabranch.ops.segments import Segments

ROWS = 16


def kda_inputs(
    x: torch.Tensor,
    segments: Segments,
    slots: torch.Tensor,
    pool: torch.Tensor,
    weight: torch.Tensor,
    beta_logits: torch.Tensor,
    layout: Layout = "normed",
    tile: Tile = TILE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See spec.py. D is a power of two from 16 up; 2 to 4 taps.

    Raises:
        ValueError: another number of taps.
    """
    x, taps = aligned_rows(x), taps_of(weight)
    tokens, (heads, dim), count = x.shape[0], width_of(beta_logits, x), len(segments)
    like = {"device": x.device}
    both = torch.empty(2, tokens, heads, dim, dtype=torch.float32 if layout == "normed" else x.dtype, **like)
    v = torch.empty(tokens, heads, dim, dtype=x.dtype, **like)
    beta = torch.empty(tokens, heads, dtype=torch.float32, **like)
    if tokens:
        strides = (x.stride(0), slots.stride(0), pool.stride(0), beta_logits.stride(0))
        _produce[(3 * heads + tile.tokens // ROWS, places(tokens, count, tile))](
            *(x, segments.offsets, slots, pool, weight, beta_logits, both, v, beta),
            *(tokens, count, (count + 1).bit_length(), *strides),
            H=heads,
            D=dim,
            WIDE=triton.next_power_of_2(heads),
            TAPS=taps,
            NORM=layout != "grouped",
            ROWS=ROWS,
            **walked(tile),
        )
        replace_history(x, segments, slots, pool, taps)
    return both[0], both[1], v, beta


@triton.jit(
    do_not_specialize=["T", "B", "steps", "slot_stride", "beta_stride"],
    do_not_specialize_on_alignment=["offsets", "slots", "beta_logits"],
)
def _produce(
    x,
    offsets,
    slots,
    pool,
    weight,
    beta_logits,
    both,
    v,
    beta,
    T,
    B,
    steps,
    x_stride,
    slot_stride,
    pool_pitch,
    beta_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    TAPS: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    STREAMS: tl.constexpr,
    RUN: tl.constexpr,
    ASM: tl.constexpr,
):
    column, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, start, end, slot = piece_of(place, offsets, slots, T, B, steps, slot_stride, STREAMS * RUN)
    if first < end:
        live = slot >= 0
        if column >= 3 * H:
            t = first + (column - 3 * H) * ROWS
            _strengths(beta_logits, beta, t, end, live, beta_stride, H, WIDE, ROWS)
        else:
            _channels(
                x, pool + slot * pool_pitch, weight, both, v, column, first, start, end, live, T, x_stride,
                H, D, TAPS, NORM, STREAMS, RUN, ASM,
            )  # fmt: skip


@triton.jit
def _channels(
    x, past, weight, both, v, column, first, start, end, live, T, x_stride,
    H: tl.constexpr, D: tl.constexpr, TAPS: tl.constexpr, NORM: tl.constexpr, STREAMS: tl.constexpr,
    RUN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One head of q, k or v; `past` is the slot's history."""
    P: tl.constexpr = H * D
    part, c = column // H, tl.arange(0, D)
    channel, head = column * D + c, (column % H) * D + c
    if part == 2:
        walk(
            x, past, weight, v + head, first, start, end, live, channel, c < D, x_stride, 3 * P, P,
            TAPS, False, STREAMS, RUN, ASM,
        )  # fmt: skip
    else:
        walk(
            x, past, weight, both + part.to(tl.int64) * T * P + head, first, start, end, live, channel, c < D,
            x_stride, 3 * P, P, TAPS, NORM, STREAMS, RUN, ASM,
        )  # fmt: skip


@triton.jit
def _strengths(
    beta_logits, beta, first, end, live, beta_stride, H: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr
):
    """sigmoid of the write-strength logits of ROWS tokens before `end`, dense; zero without `live`."""
    t, h = (first + tl.arange(0, ROWS))[:, None], tl.arange(0, WIDE)[None, :]
    there = (t < end) & (h < H)
    logit = tl.load(beta_logits + t * beta_stride + h, there & live, other=0.0).to(tl.float32)
    strength = tl.where(live, 1.0 / (1.0 + tl.exp(-logit)), 0.0)
    tl.store(beta + t * H + h, strength, there)
