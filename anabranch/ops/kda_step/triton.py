"""The whole KDA decode step in one launch: conv shift, SiLU, L2 norms, decay, write strength, delta rule, gated norm.

One program owns one head of one request with all its value rows, hence also all its conv channels: nobody else reads
the history that it shifts. Every value is rounded where the chain of separate operations rounds it.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
import torch
import triton
import triton.language as tl

from anabranch.ops.kda_decode.triton import _sigmoid, _step, aligned_rows

TAPS = 4
WARPS = 4


def kda_step(
    qkv: torch.Tensor,
    conv_pool: torch.Tensor,
    conv_weight: torch.Tensor,
    forget: torch.Tensor,
    beta_logits: torch.Tensor,
    gate: torch.Tensor,
    dt_bias: torch.Tensor,
    a_log: torch.Tensor,
    lower_bound: float | None,
    norm_weight: torch.Tensor,
    eps: float,
    slots: torch.Tensor,
    state: torch.Tensor,
    *,
    early: bool = False,
    keep: torch.Tensor | None = None,
    f_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token of every slot, from raw projections to the normed and gated output. In place on both pools.

    Args:
        qkv: model dtype [B, 3*H*D], raw projection rows at any row stride.
        conv_pool: model dtype [slots, 3, 3*H*D], last raw rows, row 0 oldest.
        conv_weight: fp32 [3*H*D, 4]; tap 3 multiplies the current token.
        forget, gate: model dtype [B, H*D], any row stride; `beta_logits` [B, H], unit inner stride.
        dt_bias: fp32 [H*D]; `a_log` fp32 [H]; `norm_weight` fp32 [D], D a power of two from 16 up.
        lower_bound: None for the softplus gate.
        slots: int64 [B]; -1 is no slot: pools untouched, output zero. A slot appears at most once.
        state: fp32 or bf16 [slots, H, D(value), D(key)].
        early: without effect: this kernel never starts before the one before it has ended.

    Returns:
        model dtype [B, H*D].

    Raises:
        ValueError: `keep`, `f_b` or several tokens a request, which the CUDA kernel and the reference take.

    Source: model_spec sections 4.2 to 4.9.
    """
    if keep is not None or f_b is not None or qkv.shape[0] != slots.shape[0]:
        raise ValueError("kda_step=triton takes one token a request, state in place and a finished forget logit")
    assert conv_weight.shape[1] == TAPS, "the kernel is written for four taps"
    qkv, forget, gate = (aligned_rows(t) for t in (qkv, forget, gate))
    requests, heads, dim = slots.shape[0], state.shape[1], state.shape[2]
    y = torch.empty(requests, heads * dim, dtype=qkv.dtype, device=qkv.device)
    _fused_step[(heads, requests)](
        *(qkv, forget, beta_logits, gate, slots, conv_pool, conv_weight, dt_bias, a_log, norm_weight, state, y),
        *(t.stride(0) for t in (qkv, forget, beta_logits, gate, slots)),
        conv_pool.stride(0),
        state.stride(0),
        dim**-0.5,
        0.0 if lower_bound is None else lower_bound,
        eps,
        BOUNDED=lower_bound is not None,
        H=heads,
        D=dim,
        num_warps=WARPS,
    )
    return y


@triton.jit
def _conv(x, row, weight, P3: tl.constexpr):
    """Four taps over three stored rows and the new value, and SiLU: fp32, rounded to the dtype of x. All [key]."""
    acc = tl.load(row).to(tl.float32) * tl.load(weight)
    acc = acc + tl.load(row + P3).to(tl.float32) * tl.load(weight + 1)
    acc = acc + tl.load(row + 2 * P3).to(tl.float32) * tl.load(weight + 2)
    acc = acc + x.to(tl.float32) * tl.load(weight + 3)
    return (acc * _sigmoid(acc)).to(x.dtype).to(tl.float32)


@triton.jit
def _shift(row, x, P3: tl.constexpr):
    """Drop the oldest row and append x. A barrier stands between the last read of a row and its overwriting."""
    middle, newest = tl.load(row + P3), tl.load(row + 2 * P3)
    tl.debug_barrier()
    tl.store(row, middle)
    tl.store(row + P3, newest)
    tl.store(row + 2 * P3, x)


@triton.jit
def _log_decay(forget, dt_bias, a_log, lower_bound, BOUNDED: tl.constexpr):
    zeta = forget.to(tl.float32) + dt_bias
    rate = tl.exp(a_log)
    if BOUNDED:
        return lower_bound * _sigmoid(rate * zeta)
    return -rate * tl.where(zeta > 20.0, zeta, tl.log(1.0 + tl.exp(tl.minimum(zeta, 20.0))))


@triton.jit(
    do_not_specialize=["beta_stride", "slot_stride"],
    do_not_specialize_on_alignment=["beta", "slots"],
)
def _fused_step(
    qkv,
    forget,
    beta,
    gate,
    slots,
    pool,
    weight,
    dt_bias,
    a_log,
    norm,
    state,
    out,
    qkv_stride,
    forget_stride,
    beta_stride,
    gate_stride,
    slot_stride,
    pool_pitch,
    state_pitch,
    scale,
    lower_bound,
    eps,
    BOUNDED: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
):
    P: tl.constexpr = H * D
    h = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, D)
    channel = h * D + c
    slot = tl.load(slots + b * slot_stride).to(tl.int64)
    y_ptr = out + b * P + channel
    if slot < 0:
        tl.store(y_ptr, tl.zeros([D], out.dtype.element_ty))
        return
    S_ptr = state + slot * state_pitch + h * (D * D) + c[:, None] * D + c[None, :]
    S = tl.load(S_ptr).to(tl.float32)
    row, taps = pool + slot * pool_pitch + channel, weight + channel * 4
    x_ptr = qkv + b * qkv_stride + channel
    q_raw, k_raw, v_raw = tl.load(x_ptr), tl.load(x_ptr + P), tl.load(x_ptr + 2 * P)
    q = _conv(q_raw, row, taps, 3 * P)
    k = _conv(k_raw, row + P, taps + 4 * P, 3 * P)
    v = _conv(v_raw, row + 2 * P, taps + 8 * P, 3 * P)
    f = tl.load(forget + b * forget_stride + channel)
    g = _log_decay(f, tl.load(dt_bias + channel), tl.load(a_log + h), lower_bound, BOUNDED)
    q = q * tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
    k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    S, o = _step(S, q, k, v, g, _sigmoid(tl.load(beta + b * beta_stride + h).to(tl.float32)))
    tl.store(S_ptr, S.to(state.dtype.element_ty))
    _shift(row, q_raw, 3 * P)
    _shift(row + P, k_raw, 3 * P)
    _shift(row + 2 * P, v_raw, 3 * P)
    o = o.to(out.dtype.element_ty).to(tl.float32)
    y = o * tl.rsqrt(tl.sum(o * o, 0) / D + eps) * tl.load(norm + c)
    z = tl.load(gate + b * gate_stride + channel).to(tl.float32)
    tl.store(y_ptr, (y * _sigmoid(z)).to(out.dtype.element_ty))
