"""The product with a block-FP8 weight in one order of addition: bits depend on a row of x, a row of W and K alone."""

import torch

from anabranch.ops.fp8_linear.reference import dequantize
from anabranch.ops.linear.deterministic import linear


def fp8_linear(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """y = x W^T: the fold of the plain product, over weights dequantised in fp32."""
    return linear(x.float(), dequantize(codes, scale)).to(x.dtype)
