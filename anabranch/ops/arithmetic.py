"""Arithmetic whose bits depend on the values alone: not on a vector's length, on its place in it, or on strides.

PyTorch's fp32 sigmoid, SiLU and softplus on a CPU give other last bits in the tail of a vector than in its body, and
library reductions and GEMMs choose their order of addition by shape. exp, log, tanh and sqrt do not, nor does anything
elementwise that IEEE 754 rounds exactly. With `row_sum` as its sum a function leaves everything to the library.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F


@cache
def scalar(value: float, dtype: torch.dtype) -> torch.Tensor:
    """A number as the tensor that PyTorch would otherwise make of it in each operation on a CPU with this dtype."""
    with torch.inference_mode(False):  # training may save it
        return torch.tensor(value, dtype=dtype, device="cpu")


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension in whatever order the library likes."""
    return x.sum(-1)


def fold_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension by halving: one fixed tree for each length, whatever surrounds the row."""
    size = x.shape[-1]
    width = 1 << max(size - 1, 0).bit_length()
    if width != size:
        x = F.pad(x, (0, width - size))
    while width > 1:
        width //= 2
        x = torch.add(*x.chunk(2, -1))
    return x.squeeze(-1)


Total = Callable[[torch.Tensor], torch.Tensor]  # row_sum or fold_sum


def sigmoid(x: torch.Tensor, total: Total = fold_sum) -> torch.Tensor:
    """1 / (1 + exp(-x)) in fp32, rounded to x's dtype."""
    if total is row_sum:
        return torch.sigmoid(x)
    raised = torch.exp(-x.float())
    return raised.add(scalar(1.0, raised.dtype)).reciprocal().type_as(x)


def silu(x: torch.Tensor, total: Total = fold_sum) -> torch.Tensor:
    """x * sigmoid(x) in fp32, rounded to x's dtype."""
    if total is row_sum:
        return F.silu(x)
    x32 = x.float()
    return (x32 * sigmoid(x32)).type_as(x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)) in fp32, and x itself above 20."""
    x32 = x.float()
    return torch.where(x32 > 20.0, x32, torch.log(1.0 + torch.exp(x32.clamp(max=20.0))))


def softmax(x: torch.Tensor, total: Total) -> torch.Tensor:
    """Softmax over the last dimension."""
    if total is row_sum:
        return torch.softmax(x, -1)
    raised = torch.exp(x - x.amax(-1, keepdim=True))
    return raised / total(raised).unsqueeze(-1)


def unit_rms(x: torch.Tensor, eps: float, total: Total) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, for fp32 x."""
    if total is not row_sum:
        return x * torch.rsqrt(total(x.square()) / x.shape[-1] + eps).unsqueeze(-1)
    if x.is_cpu:  # there F.rms_norm is seven operations
        return x * inverse_length(x, eps, 1 / x.shape[-1])
    return F.rms_norm(x, x.shape[-1:], eps=eps)


def inverse_length(x: torch.Tensor, eps: float, scale: float = 1.0) -> torch.Tensor:
    """1 / sqrt(scale * sum(x^2) + eps) over the last dimension, which stays as one column; fp32 x on a CPU."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(scalar(eps, x.dtype), length, length, value=scale).rsqrt()
