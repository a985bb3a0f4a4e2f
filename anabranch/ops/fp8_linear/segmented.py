"""Batch-invariant products, each shape through one kernel whatever the number of tokens. See spec.py for shapes.

A weight that the CUDA kernel can take goes through it 128 tokens at a time, any other through Triton.
"""

import torch

from anabranch.ops.fp8_linear import cuda, triton


def fp8_linear(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """y = x W^T: [T, K] and codes [N, K] under scale -> [T, N]."""
    return cuda.fp8_linear(x, codes, scale) if cuda.fits(x, codes, scale) else triton.fp8_linear(x, codes, scale)
