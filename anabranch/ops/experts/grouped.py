"""Routed experts of prompts in CUDA C++ for Hopper: a sort of the pairs, their rows, two products (csrc/grouped*.cuh).

The bits are those of the Triton kernels: 64 weight rows by tokens on wgmma, K in ascending order, the same roundings.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from anabranch.config.model import ActivationConfig
from anabranch.ops import native
from anabranch.ops.experts.reference import ExpertBank, mean_pairs
from anabranch.ops.experts.tiles import slots

TILES = 128, 240  # pairs of a tile where an expert gets up to FEW pairs on average, and where it gets more
TAIL = 32  # what a tile may hold beyond them
FEW = 160  # between 128, where the smaller tiles are faster, and 192, where the larger are
LEAST = 48  # pairs that an expert gets on average, above which these kernels are used
EXPERTS = 512  # most experts that the sort takes


@dataclass(frozen=True, kw_only=True, slots=True)
class Sorted:
    """Pair i is the `places[i]`-th of the pairs sorted by expert, -1 if another rank's: int32 [P].

    `table` is that of `tiles.Tiles`, over the sorted pairs; no tile has more than `most` of them.
    """

    places: torch.Tensor
    table: torch.Tensor
    most: int


@cache
def available(device: int) -> bool:
    """Whether this GPU is a Hopper and the library is built or can be."""
    return torch.cuda.get_device_capability(device) == (9, 0) and native.verdict("experts").ok


def fits(x: torch.Tensor, bank: ExpertBank) -> bool:
    """Whether these tensors are laid out as the kernels read them; says nothing about speed."""
    w13, w2 = getattr(bank, "w13", None), getattr(bank, "w2", None)
    if w13 is None or w2 is None or not x.dtype == w13.dtype == w2.dtype == torch.bfloat16:
        return False
    sizes = (x.stride(0), w2.shape[1], w2.shape[2])
    whole = x.stride(1) == 1 and w13.is_contiguous() and w2.is_contiguous()
    aligned = all(size % 8 == 0 for size in sizes) and all(t.data_ptr() % 16 == 0 for t in (x, w13, w2))
    return whole and aligned


def check(x: torch.Tensor, bank: ExpertBank) -> None:
    """ValueError unless `fits`."""
    if not fits(x, bank):
        raise ValueError(
            f"experts: x {tuple(x.shape)} {x.dtype} with strides {x.stride()}: the CUDA products need bf16, dense "
            "stacks, a row pitch and both widths that are multiples of 8, and addresses that are multiples of 16"
        )


def worth(x: torch.Tensor, top_k: int, bank: ExpertBank) -> bool:
    """Whether a step's routed experts run here rather than on Triton."""
    many = mean_pairs(len(x), top_k, bank) > LEAST and bank.count <= EXPERTS
    return many and x.is_cuda and fits(x, bank) and available(x.get_device())


def expert_products(
    x: torch.Tensor, experts: torch.Tensor, bank: ExpertBank, activation: ActivationConfig
) -> torch.Tensor:
    """down_e(glu(gate_up_e x)) of every local (token, choice) pair: [T * k, W]; other ranks' rows stay as they are.

    Args:
        x: bf16 [T, W], inner stride one.
        experts: int64 [T, k], dense, global indices.
        bank: dense bf16 stacks `w13` [E, 2*I, W] and `w2` [E, W, I]; see `fits`.
    """
    tile = TILES[mean_pairs(len(x), experts.shape[1], bank) > FEW]
    made = sort(experts, bank.first, bank.count, tile)
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    return products(x, made, bank, activation, programs)


def sort(experts: torch.Tensor, first: int, count: int, tile: int) -> Sorted:
    """The pairs of the local experts `first .. first + count`, at most `EXPERTS` of them, in as many tiles as those of
    `tiles.align`; those of an expert are about as large as each other, and the largest come first.

    Args:
        experts: int64 [T, k], dense, global indices.
        tile: pairs of a tile, `TAIL` not counted, of which more make another tile; one of `TILES` for `products`.

    Raises:
        ValueError: more experts than the sort takes.
    """
    if count > EXPERTS:
        raise ValueError(f"experts: {count} local ones, the sort of the grouped products takes up to {EXPERTS}")
    pairs, like = experts.numel(), {"dtype": torch.int32, "device": experts.device}
    places, table = torch.empty(pairs, **like), torch.empty((3, slots(pairs, count, tile)), **like)
    native.load("experts").grouped_sort(experts, first, count, tile, TAIL, places, table)
    return Sorted(places=places, table=table, most=tile + TAIL)


def products(
    x: torch.Tensor, made: Sorted, bank: ExpertBank, activation: ActivationConfig, programs: int
) -> torch.Tensor:
    """The same for pairs that are sorted already, by at most `programs` programs.

    Raises:
        ValueError: x or the bank is not laid out as the kernels read them.
    """
    check(x, bank)
    store: Any = bank
    pairs, (_, width, inner) = made.places.numel(), store.w2.shape
    like = {"dtype": x.dtype, "device": x.device}
    kernels, order, table = native.load("experts"), torch.empty_like(made.places), made.table
    situ, beta, cap = activation.name == "situ", float(activation.beta), float(activation.linear_beta or 0)
    rows, h = torch.empty((pairs, width), **like), torch.empty((pairs, inner), **like)
    kernels.grouped_spread(x, made.places, order, rows)
    kernels.grouped_gate_up(rows, store.w13, table, h, situ, beta, cap, made.most, programs)
    del rows  # as large as what follows, which may take its place
    out = torch.empty((pairs, width), **like)
    kernels.grouped_down(h, store.w2, order, table, out, made.most, programs)
    return out
