"""Arithmetic whose bits depend on the values alone: not on a vector's length, on its place in it, or on strides.

PyTorch's fp32 sigmoid, SiLU and softplus on a CPU give other last bits in the tail of a vector than in its body, and
library reductions and GEMMs choose their order of addition by shape. exp, log, tanh and sqrt do not, nor does anything
elementwise that IEEE 754 rounds exactly.
"""

import torch
import torch.nn.functional as F


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)) in fp32, rounded to x's dtype."""
    return (1.0 / (1.0 + torch.exp(-x.float()))).to(x.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x) in fp32, rounded to x's dtype."""
    x32 = x.float()
    return (x32 * sigmoid(x32)).to(x.dtype)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)) in fp32, and x itself above 20."""
    x32 = x.float()
    return torch.where(x32 > 20.0, x32, torch.log(1.0 + torch.exp(x32.clamp(max=20.0))))


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
        x = x[..., :width] + x[..., width:]
    return x[..., 0]
