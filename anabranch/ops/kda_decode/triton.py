"""The delta rule on the GPU: one kernel for decode tokens and for whole segments, and the fused decode step.

One program owns TILE value rows of one head's state. It walks its tokens with those rows in registers, so a segment of
any length gives the bits of as many decode steps. Nothing that varies with the batch is specialised on: both callers
run one and the same binary. Shape legend: S [value, key]; q, k, g [key]; v, o [value].
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
import torch
import triton
import triton.language as tl

from anabranch.ops.segments import Segments

TILE = 8  # value rows of one warp: no sum crosses warps, so a token costs no barrier
WARPS = 1


def kda_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    slots: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """See spec.py. D is a power of two from 16 up."""
    return delta_rule(q, k, v, g, beta, None, slots, state)


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    segments: Segments | None,
    slots: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Token form over segments, or over one token a slot when `segments` is None: o [T, H, D]."""
    q, k, v, g = (aligned_rows(t) for t in (q, k, v, g))
    beta = beta if beta[:1].is_contiguous() else beta.contiguous()
    heads, dim = v.shape[1:]
    tile = min(TILE, dim)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    strides = (t.stride(0) for t in (q, k, v, g, beta, slots))
    _delta_rule[(dim // tile, heads, slots.shape[0])](
        *(q, k, v, g, beta, slots, slots if segments is None else segments.offsets, state, o),
        *strides,
        state.stride(0),
        int(segments is not None),
        dim**-0.5,
        H=heads,
        D=dim,
        TILE=tile,
        num_warps=WARPS,
    )
    return o


def aligned_rows(t: torch.Tensor) -> torch.Tensor:
    """t with every row contiguous and at a multiple of 16 bytes, so that every call is the same binary."""
    if t[:1].is_contiguous() and t.stride(0) % 16 == 0 and t.data_ptr() % 16 == 0:
        return t
    return t.clone(memory_format=torch.contiguous_format)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _step(S, q, k, v, g, beta):
    """Decay, predict, write, read. Reading S + error k as S q + (k q) error lets both sums over S run side by side."""
    S = S * tl.exp(g)[None, :]
    error = beta * (v - tl.sum(S * k[None, :], 1))
    o = tl.sum(S * q[None, :], 1) + tl.sum(q * k, 0) * error
    return S + error[:, None] * k[None, :], o


# these change with the batch, and a binary of their own could add in another order
@triton.jit(
    do_not_specialize=["beta_stride", "slot_stride", "ragged"],
    do_not_specialize_on_alignment=["beta", "slots", "offsets"],
)
def _delta_rule(
    q,
    k,
    v,
    g,
    beta,
    slots,
    offsets,
    state,
    out,
    q_stride,
    k_stride,
    v_stride,
    g_stride,
    beta_stride,
    slot_stride,
    state_pitch,
    ragged,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
):
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    value, key = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, D)
    first, last = b, b + 1
    if ragged:
        first = tl.load(offsets + b)
        last = tl.load(offsets + b + 1)
    slot = tl.load(slots + b * slot_stride).to(tl.int64)
    o_ptr = out + h * D + value
    if slot < 0:
        for t in range(first, last):
            tl.store(o_ptr + t * (H * D), tl.zeros([TILE], out.dtype.element_ty))
        return
    q_ptr, k_ptr, g_ptr = q + h * D + key, k + h * D + key, g + h * D + key
    v_ptr, beta_ptr = v + h * D + value, beta + h
    S_ptr = state + slot * state_pitch + h * (D * D) + value[:, None] * D + key[None, :]
    S = tl.load(S_ptr).to(tl.float32)
    some = first < last
    q_t, k_t = tl.load(q_ptr + first * q_stride, some), tl.load(k_ptr + first * k_stride, some)
    g_t, v_t = tl.load(g_ptr + first * g_stride, some), tl.load(v_ptr + first * v_stride, some)
    beta_t = tl.load(beta_ptr + first * beta_stride, some)
    for t in range(first, last):
        # the next token is fetched while this one is computed: its latency would be most of the step
        some, n = t + 1 < last, t + 1
        q_n, k_n = tl.load(q_ptr + n * q_stride, some), tl.load(k_ptr + n * k_stride, some)
        g_n, v_n = tl.load(g_ptr + n * g_stride, some), tl.load(v_ptr + n * v_stride, some)
        beta_n = tl.load(beta_ptr + n * beta_stride, some)
        S, o = _step(S, q_t * scale, k_t, v_t.to(tl.float32), g_t, beta_t)
        S = S.to(state.dtype.element_ty).to(tl.float32)  # a stored state is rounded at every token, as in decode
        tl.store(o_ptr + t * (H * D), o.to(out.dtype.element_ty))
        q_t, k_t, g_t, v_t, beta_t = q_n, k_n, g_n, v_n, beta_n
    tl.store(S_ptr, S.to(state.dtype.element_ty))
