"""Batch-invariant products, each shape through the faster of two kernels whose bits agree. See spec.py for shapes.

Few tokens through ops/skinny_gemm, more through Triton: both sum K in the same four segments.
"""

import torch

from anabranch.ops.linear import triton
from anabranch.ops.skinny_gemm import cuda


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """y = x W^T."""
    return cuda.linear(x, w) if cuda.fits(x, w) else triton.linear(x, w)


def batched_linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """y[g] = x[g] W[g]^T."""
    return triton.batched_linear(x, w)
