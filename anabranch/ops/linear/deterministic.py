"""Matrix products with one order of addition for every shape: bits depend on a row of x, a row of W and K alone.

Plain elementwise products and a fixed tree, so the guarantee holds by construction on any device. Made for small
models on a CPU; Hopper has its own kernel.
"""

import torch

from anabranch.ops.arithmetic import fold_sum

PRODUCTS = 1 << 22  # most fp32 products held at once


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """y = x W^T, each element a fold over K of exact-order fp32 products."""
    step = max(1, PRODUCTS // max(1, w.numel()))
    if len(x) > step:
        return torch.cat([linear(part, w) for part in x.split(step)])
    return fold_sum(x.float().unsqueeze(1) * w.float()).type_as(x)


def batched_linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """y[g] = x[g] W[g]^T."""
    return torch.stack([linear(a, b) for a, b in zip(x, w, strict=True)])
