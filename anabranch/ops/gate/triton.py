"""The output gate as one Triton launch, and the fp32 functions that other kernels share with it. See spec.py."""

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

from anabranch.ops.early import early_launch, follow

# libdevice's exp is the one in PyTorch's own CUDA kernels, bit for bit; Triton's interpreter does not know it
_LIBDEVICE = tl.constexpr(not knobs.runtime.interpret)
_NARROW, _WIDE = 512, 2048  # columns of a program: many small ones start sooner, until there are too many to be at once
_MOST_NARROW = 1024  # narrow programs; at 96 heads 32 rows are 768 of them and faster so, 128 rows are not


@triton.jit
def exp32(x):
    """exp of fp32, accurate to the last bit or two over the whole range."""
    if _LIBDEVICE:
        return libdevice.exp(x)
    else:
        return tl.exp(x)


@triton.jit
def log32(x):
    """Natural logarithm of fp32, as exp32 is accurate."""
    if _LIBDEVICE:
        return libdevice.log(x)
    else:
        return tl.log(x)


@triton.jit
def sigmoid32(x):
    """1 / (1 + exp(-x)) of fp32, each step rounded as IEEE 754 does."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + exp32(-x))


@triton.jit
def _gate(x, g, y, width, x_stride, g_stride, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    follow(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(g + row * g_stride + column, mask=inside, other=0.0)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    gate = sigmoid32(gate.to(tl.float32)).to(value.dtype)
    product = value.to(tl.float32) * gate.to(tl.float32)
    tl.store(y + row * width + column, product.to(value.dtype), mask=inside)


def sigmoid_gate(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(g), rounding twice as the pair of torch operations does: [T, W]."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        rows, width = x.shape
        block = _NARROW if rows * triton.cdiv(width, _NARROW) <= _MOST_NARROW else _WIDE
        # a multiply-add contracted across two torch operations would round once where they round twice
        options = {"num_warps": 4, "enable_fp_fusion": False, **early_launch()}
        grid = (rows, triton.cdiv(width, block))
        _gate[grid](x, g, y, width, x.stride(0), g.stride(0), BLOCK=block, **options)
    return y
