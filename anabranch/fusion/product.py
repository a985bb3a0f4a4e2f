"""What a projection multiplies by: a plain matrix, block-FP8 codes under their scales, or either with an adapter."""

from dataclasses import dataclass

import torch
from torch import nn

from anabranch.fusion import counters
from anabranch.ops.registry import Ops


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """E4M3 codes [N, K] and their scales [ceil(N/128), ceil(K/128)]; row 0 starts a scale block."""

    codes: torch.Tensor
    scale: torch.Tensor


class Adapter(nn.Module):
    """A LoRA pair of one projection: y += scale * (x A^T) B^T with A [r, K] and B [N, r], this rank's part of both.

    Not part of the state dict: checkpoints know the base weights alone.
    """

    def __init__(self, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.register_buffer("a", a, persistent=False)
        self.register_buffer("b", b, persistent=False)
        self.scale = scale


@dataclass(frozen=True, slots=True)
class Adapted:
    """A projection and the adapter on it."""

    base: torch.Tensor | Fp8Rows
    adapter: Adapter


Factor = torch.Tensor | Fp8Rows | Adapted


def multiply(ops: Ops, x: torch.Tensor, factor: Factor) -> torch.Tensor:
    """x W^T, rounded to x's dtype; an adapter's part is rounded before it is added."""
    if isinstance(factor, Adapted):
        counters.add("lora")
        adapter = factor.adapter
        y = multiply(ops, x, factor.base)
        return y.add_(ops.linear(ops.linear(x, adapter.a), adapter.b), alpha=adapter.scale)
    if isinstance(factor, Fp8Rows):
        counters.add("fp8.gemm")
        return ops.fp8_linear(x, factor.codes, factor.scale)
    return ops.linear(x, factor)
