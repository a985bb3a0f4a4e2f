"""Gated activations as one Triton launch, and the activation that the expert kernels fuse. See spec.py for shapes."""

import torch
import triton
import triton.language as tl

from anabranch.config.model import ActivationConfig
from anabranch.ops.early import early_launch, follow
from anabranch.ops.gate.triton import exp32, sigmoid32

_BLOCK = 1024


@triton.jit
def tanh32(x):
    """tanh of fp32: (1 - e) / (1 + e) with e = exp(-2|x|), and its series where that would cancel."""
    size = tl.abs(x)
    e = exp32(-2.0 * size)
    far = tl.div_rn(1.0 - e, 1.0 + e)
    s = x * x
    near = size * (1.0 - s * (1.0 / 3 - s * (2.0 / 15 - s * (17.0 / 315 - s * (62.0 / 2835)))))
    return tl.where(x < 0, -1.0, 1.0) * tl.where(size < 0.25, near, far)


@triton.jit
def activate(gate, up, SITU: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    """act(gate, up) of two tiles of the model dtype, with the roundings of the reference; LINEAR_BETA 0 is no cap."""
    gate32, up32 = gate.to(tl.float32), up.to(tl.float32)
    if SITU:
        capped = BETA * tanh32(gate32 * (1.0 / BETA)) * sigmoid32(gate32)
        if LINEAR_BETA != 0:
            up32 = LINEAR_BETA * tanh32(up32 * (1.0 / LINEAR_BETA))
        return (capped * up32).to(gate.dtype)
    else:
        silu = (gate32 * sigmoid32(gate32)).to(gate.dtype)
        return (silu.to(tl.float32) * up32).to(gate.dtype)


def activation_constants(activation: ActivationConfig) -> dict[str, bool | float]:
    """The compile-time arguments of `activate`."""
    return {
        "SITU": activation.name == "situ",
        "BETA": float(activation.beta),
        "LINEAR_BETA": float(activation.linear_beta or 0.0),
    }


@triton.jit
def _glu(
    gate_up,
    y,
    inner,
    stride,
    SITU: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    follow(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * stride + inner + column, mask=inside, other=0.0)
    tl.store(y + row * inner + column, activate(gate, up, SITU, BETA, LINEAR_BETA), mask=inside)


def glu(gate_up: torch.Tensor, activation: ActivationConfig) -> torch.Tensor:
    """act(gate, up) of [T, 2*I], gate columns first: [T, I]."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    if y.numel():
        grid = (rows, triton.cdiv(inner, _BLOCK))
        # as in the expert kernels, so that equal inputs give equal bits
        options = {**activation_constants(activation), "num_warps": 4, "enable_fp_fusion": False}
        _glu[grid](gate_up, y, inner, gate_up.stride(0), **options, BLOCK=_BLOCK, **early_launch())
    return y
