"""The decay gate as one Triton launch. See spec.py for shapes."""

import torch
import triton
import triton.language as tl

from anabranch.ops.gate.triton import exp32, log32, sigmoid32

_BLOCK = 2048  # channels a program


@triton.jit
def _log_decay(
    forget,
    dt_bias,
    a_log,
    g,
    width,
    t_stride,
    h_stride,
    bound,
    D: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    head = channel // D
    f = tl.load(forget + token * t_stride + head * h_stride + channel % D, inside, other=0.0).to(tl.float32)
    zeta = f + tl.load(dt_bias + channel, inside, other=0.0)
    rate = exp32(tl.load(a_log + head, inside, other=0.0))
    if BOUNDED:
        decay = bound * sigmoid32(rate * zeta)
    else:
        decay = -rate * tl.where(zeta > 20.0, zeta, log32(1.0 + exp32(tl.minimum(zeta, 20.0))))
    tl.store(g + token * width + channel, decay, inside)


def log_decay(
    forget: torch.Tensor, dt_bias: torch.Tensor, a_log: torch.Tensor, lower_bound: float | None
) -> torch.Tensor:
    """-rate * softplus(zeta), or lower_bound * sigmoid(rate * zeta); zeta = forget + dt_bias, rate = exp(a_log)."""
    tokens, heads, dim = forget.shape
    g = torch.empty(tokens, heads, dim, dtype=torch.float32, device=forget.device)
    if g.numel():
        width = heads * dim
        grid, options = (tokens, triton.cdiv(width, _BLOCK)), {"num_warps": 4, "enable_fp_fusion": False}
        sizes = (width, forget.stride(0), forget.stride(1), lower_bound or 0.0)
        _log_decay[grid](
            forget, dt_bias, a_log, g, *sizes, D=dim, BOUNDED=lower_bound is not None, BLOCK=_BLOCK, **options
        )
    return g
