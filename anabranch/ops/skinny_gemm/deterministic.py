"""The prologue's two products one after the other, in the one order of addition. See spec.py for shapes."""

import torch

from anabranch.ops.linear.deterministic import batched_linear, linear
from anabranch.ops.skinny_gemm.spec import ranks


def gemm_low_rank(
    x: torch.Tensor, w: torch.Tensor, low_row0: int, w2: torch.Tensor, sync: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, y2); `sync` is not used."""
    y = linear(x, w)
    return y, batched_linear(ranks(y, low_row0, w2), w2)
