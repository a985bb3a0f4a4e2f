"""Few tokens through the codes' own kernel, many through the library over the weight expanded to bf16.

Expanding reads a byte and writes two for each weight, which the library reads again: cheap beside the product of many
tokens only. It rounds w once, to nearest, so bits depend on the number of tokens. See spec.py for shapes.
"""

import torch
import torch.nn.functional as F

from anabranch.ops.fp8_linear import triton
from anabranch.ops.fp8_linear.reference import BLOCK

FROM = 129  # tokens from which the library is the faster way
SCRATCH = 128 << 20  # most bytes of expanded weight held at once


def by_library(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """y = x W^T over the expanded weight, as many rows of it at a time as SCRATCH holds."""
    rows, columns = codes.shape
    step = max(1, SCRATCH // (columns * x.element_size() * BLOCK)) * BLOCK
    if rows <= step:
        return F.linear(x, triton.expand(codes, scale, x.dtype))
    y = x.new_empty(x.shape[0], rows)
    for first in range(0, rows, step):
        part = triton.expand(codes[first : first + step], scale[first // BLOCK :], x.dtype)
        y[:, first : first + step] = F.linear(x, part)
    return y


def fp8_linear(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """y = x W^T: [T, K] and codes [N, K] under scale -> [T, N]."""
    return by_library(x, codes, scale) if x.shape[0] >= FROM else triton.fp8_linear(x, codes, scale)
