"""The producer layouts on the GPU: each raw row is read once and leaves as dense q, k and v. See spec.py for shapes.

One program owns ROWS tokens of one head of q, k or v, so a norm never leaves its program; a last column of programs
does beta. Nothing that varies with the batch is specialised on: a row's bits are its own. Tiles are [token, channel].
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
import torch
import triton
import triton.language as tl

from anabranch.ops.conv.triton import _segment_of, replace_history
from anabranch.ops.kda_decode.triton import aligned_rows
from anabranch.ops.kda_inputs.spec import Layout, width_of
from anabranch.ops.segments import Segments

ROWS, WARPS = 16, 4


def kda_inputs(
    x: torch.Tensor,
    segments: Segments,
    slots: torch.Tensor,
    pool: torch.Tensor,
    weight: torch.Tensor,
    beta_logits: torch.Tensor,
    layout: Layout = "normed",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See spec.py. D is a power of two from 16 up."""
    x = aligned_rows(x)
    tokens, (heads, dim), count = x.shape[0], width_of(beta_logits, x), len(segments)
    like = {"device": x.device}
    both = torch.empty(2, tokens, heads, dim, dtype=torch.float32 if layout == "normed" else x.dtype, **like)
    v = torch.empty(tokens, heads, dim, dtype=x.dtype, **like)
    beta = torch.empty(tokens, heads, dtype=torch.float32, **like)
    if tokens:
        _produce[(3 * heads + 1, triton.cdiv(tokens, ROWS))](
            *(x, segments.offsets, slots, pool, weight, beta_logits, both, v, beta),
            *(tokens, count, count.bit_length(), x.stride(0), slots.stride(0), pool.stride(0), beta_logits.stride(0)),
            H=heads,
            D=dim,
            WIDE=triton.next_power_of_2(heads),
            TAPS=weight.shape[1],
            NORM=layout != "grouped",
            ROWS=ROWS,
            num_warps=WARPS,
            enable_fp_fusion=False,  # as in ops/conv, whose values these are
        )
        replace_history(x, segments, slots, pool, weight.shape[1])
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
):
    column = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = t < T
    t = tl.minimum(t, T - 1)
    segment = _segment_of(t, offsets, B, steps)
    start = tl.load(offsets + segment)
    slot = tl.load(slots + segment * slot_stride)
    live = there & (slot >= 0) & (t < tl.load(offsets + B))
    if column == 3 * H:
        _strengths(beta_logits, beta, t, there, live, beta_stride, H, WIDE)
    else:
        _channels(
            x, pool, weight, both, v, column, t, there, live, start, slot, T, x_stride, pool_pitch, H, D, TAPS, NORM
        )


@triton.jit
def _strengths(beta_logits, beta, t, there, live, beta_stride, H: tl.constexpr, WIDE: tl.constexpr):
    """sigmoid of the write-strength logits, dense. t, there, live are [token]."""
    h = tl.arange(0, WIDE)
    inside = live[:, None] & (h < H)[None, :]
    logit = tl.load(beta_logits + (t * beta_stride)[:, None] + h[None, :], inside, other=0.0).to(tl.float32)
    strength = tl.where(inside, 1.0 / (1.0 + tl.exp(-logit)), 0.0)
    tl.store(beta + (t * H)[:, None] + h[None, :], strength, there[:, None] & (h < H)[None, :])


@triton.jit
def _channels(
    x, pool, weight, both, v, column, t, there, live, start, slot, T, x_stride, pool_pitch,
    H: tl.constexpr, D: tl.constexpr, TAPS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One head of q, k or v. t, there, live, start and slot are [token]."""
    P: tl.constexpr = H * D
    part, head = column // H, column % H
    c = tl.arange(0, D)
    channel = column * D + c
    inside = live[:, None] & (c < D)[None, :]
    acc = tl.zeros([t.shape[0], D], tl.float32)
    for tap in tl.static_range(TAPS):
        p = t - (TAPS - 1) + tap
        old, new = inside & (p < start)[:, None], inside & (p >= start)[:, None]
        row = pool + (slot * pool_pitch + (p - start + TAPS - 1) * (3 * P))[:, None]
        past = tl.load(row + channel[None, :], old, other=0.0)
        u = tl.load(x + (p * x_stride)[:, None] + channel[None, :], new, other=0.0)
        acc = acc + tl.where(new, u, past).to(tl.float32) * tl.load(weight + channel * TAPS + tap)[None, :]
    acc = acc / (1.0 + tl.exp(-acc))
    y = tl.where(live[:, None], acc, 0.0).to(x.dtype.element_ty)
    at = (t * P)[:, None] + (head * D + c)[None, :]
    if part == 2:
        tl.store(v + at, y, there[:, None])
    else:
        out = both + part.to(tl.int64) * T * P + at
        if NORM:
            value = y.to(tl.float32)
            value = value * tl.rsqrt(tl.sum(value * value, 1) + 1e-6)[:, None]
            tl.store(out, value.to(both.dtype.element_ty), there[:, None])
        else:
            tl.store(out, y, there[:, None])
