"""Routed experts of few pairs each in CUDA C++ for Hopper: two products that read every weight once, at memory speed.

The bits are those of the Triton kernels: 64 weight rows by tokens on wgmma, K in ascending order, the same roundings.
"""

from typing import Any

import torch

from anabranch.config.model import ActivationConfig
from anabranch.ops import native
from anabranch.ops.experts.grouped import available, check, fits
from anabranch.ops.experts.plan import RIDER_TOKENS
from anabranch.ops.experts.reference import ExpertBank, mean_pairs
from anabranch.ops.experts.tiles import Tiles, align

# pairs that an expert gets on average, between which these kernels are used; us a layer of Kimi-Linear, Triton -> here:
# 2 pairs 667 -> 662 (a shared expert that rides on Triton saves more), 3 730 -> 711, 20 874 -> 864, 32 926 -> 930
LEAST, MOST = 3, 20
TILE = 64  # most pairs of a tile: smaller ones are no faster where an expert has few and read weights twice elsewhere


def worth(x: torch.Tensor, top_k: int, bank: ExpertBank) -> bool:
    """Whether a step's routed experts run here rather than on Triton."""
    few = len(x) > RIDER_TOKENS and LEAST <= mean_pairs(len(x), top_k, bank) <= MOST
    return few and x.is_cuda and fits(x, bank) and available(x.get_device())


def expert_products(
    x: torch.Tensor, experts: torch.Tensor, bank: ExpertBank, activation: ActivationConfig
) -> torch.Tensor:
    """down_e(glu(gate_up_e x)) of every local (token, choice) pair: [T * k, W]; other ranks' rows stay as they are.

    Args:
        x: bf16 [T, W], inner stride one.
        experts: int64 [T, k], dense, global indices.
        bank: dense bf16 stacks `w13` [E, 2*I, W] and `w2` [E, W, I]; see `grouped.fits`.
    """
    made = align(experts, bank.first, bank.count, TILE)
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    return products(x, made, bank, activation, experts.shape[1], programs)


def products(
    x: torch.Tensor, made: Tiles, bank: ExpertBank, activation: ActivationConfig, top_k: int, programs: int
) -> torch.Tensor:
    """The same for pairs that are in tiles of at most `TILE` already, by at most `programs` programs.

    Raises:
        ValueError: x or the bank is not laid out as the kernels read them.
    """
    check(x, bank)
    store: Any = bank
    pairs, (_, width, inner) = made.pairs.numel(), store.w2.shape
    h, out = (torch.empty((pairs, columns), dtype=x.dtype, device=x.device) for columns in (inner, width))
    kernels, linear_beta = native.load("experts"), float(activation.linear_beta or 0)
    caps = (activation.name == "situ", float(activation.beta), linear_beta)
    kernels.stream_gate_up(x, store.w13, made.pairs, made.table, h, top_k, *caps, programs)
    kernels.stream_down(h, store.w2, made.pairs, made.table, out, programs)
    return out
