"""Few tokens through the CUDA kernel, many through the library over the expanded weight. See spec.py for shapes.

Shapes that the CUDA kernel cannot take go the way of `expanded`. Bits depend on the number of tokens.
"""

import torch

from anabranch.ops.fp8_linear import cuda, expanded


def fp8_linear(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """y = x W^T: [T, K] and codes [N, K] under scale -> [T, N]."""
    if 0 < x.shape[0] < expanded.FROM and cuda.fits(x, codes, scale):
        return cuda.multiply(x, codes, scale)
    return expanded.fp8_linear(x, codes, scale)
