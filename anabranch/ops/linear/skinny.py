"""Few tokens through ops/skinny_gemm, more through the library. See spec.py for shapes."""

import torch
import torch.nn.functional as F

from anabranch.ops.skinny_gemm import cuda
from anabranch.ops.skinny_gemm.configs import faster, low_rank_faster


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """y = x W^T."""
    if faster(x.shape[0], w.shape[0], x.shape[1]) and cuda.fits(x, w):
        return cuda.linear(x, w)
    return F.linear(x, w)


def batched_linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """y[g] = x[g] W[g]^T."""
    if low_rank_faster(x.shape[1]) and cuda.low_rank_fits(x, w):
        return cuda.low_rank(x, w)
    return torch.bmm(x, w.mT)
