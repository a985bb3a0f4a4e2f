"""Routed MXFP4 experts of few pairs each in CUDA C++ for Hopper: a sort, arranged rows, two products (csrc/few.cuh).

The bits are those of the Triton kernels: the same exact weights, K in ascending order, the same roundings.
"""

from functools import cache
from typing import Any

import torch

from anabranch.config.model import ActivationConfig
from anabranch.ops import native
from anabranch.ops.experts.reference import ExpertBank, mean_pairs, stacks
from anabranch.ops.experts.tiles import align
from anabranch.ops.mxfp4.triton import BLOCK, arrange

# pairs that an expert gets on average: tiles of 8 of them up to FEW (us at 6.0: 332, of 16: 357; at 6.9: 377 and 363),
# above of 16; these kernels are used up to MOST (us at 13.7: 452, Triton: 555; at 16: 520 and 501)
FEW, MOST = 6, 14
COLUMNS = 3968  # most of a matrix: two stages of 512 columns and the scales of two pieces fit in shared memory


@cache
def available(device: int) -> bool:
    """Whether this GPU is a Hopper and the library is built or can be."""
    return torch.cuda.get_device_capability(device) == (9, 0) and native.verdict("mxfp4").ok


def refusal(x: torch.Tensor, bank: ExpertBank) -> str | None:
    """Why the kernels cannot read these tensors, or None; says nothing about speed."""
    (w13, w13_scale), (w2, w2_scale), packed = stacks(bank)
    if not packed or x.dtype != torch.bfloat16:
        return f"{'MXFP4' if packed else 'plain'} experts of {x.dtype} rows, not MXFP4 ones of torch.bfloat16"
    for what, columns in (("width", x.shape[1]), ("inner width", w2.shape[2] * 2)):
        if columns % BLOCK or columns > COLUMNS:
            return f"{what} {columns}, not a multiple of {BLOCK} up to {COLUMNS}"
    if x.stride(1) != 1:
        return f"rows with strides {x.stride()}, not dense ones"
    if not all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (w13, w13_scale, w2, w2_scale)):
        return "codes or scales that are not dense at a multiple of 16 bytes"
    return None


def worth(x: torch.Tensor, top_k: int, bank: ExpertBank) -> bool:
    """Whether a step's routed experts run here rather than on Triton."""
    few = mean_pairs(len(x), top_k, bank) <= MOST
    return few and x.is_cuda and refusal(x, bank) is None and available(x.get_device())


def expert_products(
    x: torch.Tensor, experts: torch.Tensor, bank: ExpertBank, activation: ActivationConfig, tile: int | None = None
) -> torch.Tensor:
    """down_e(glu(gate_up_e x)) of every local (token, choice) pair: [T * k, W]; other ranks' rows stay as they are.

    Args:
        x: bf16 [T, W], inner stride one.
        experts: int64 [T, k], dense, global indices.
        bank: `w13_packed`, `w13_scale`, `w2_packed`, `w2_scale`; see `refusal`.
        tile: 8 or 16 pairs of an expert at a time, None for the rule; no bit depends on it.

    Raises:
        ValueError: the kernels cannot read x or the bank.
    """
    tokens, top_k = experts.shape
    tile = tile or (8 if mean_pairs(tokens, top_k, bank) <= FEW else 16)
    made = align(experts, bank.first, bank.count, tile)
    return products(x, made.pairs, made.table, bank, activation, top_k, tile)


def products(
    x: torch.Tensor,
    order: torch.Tensor,
    table: torch.Tensor,
    bank: ExpertBank,
    activation: ActivationConfig,
    top_k: int,
    tile: int,
) -> torch.Tensor:
    """The same for pairs that are sorted already: `order` and `table` are those of `tiles.Tiles`.

    Raises:
        ValueError: the kernels cannot read x or the bank.
    """
    if why := refusal(x, bank):
        raise ValueError(f"mxfp4: {why}")
    store: Any = bank
    pairs, (_, width, half) = len(order), store.w2_packed.shape
    h, out = (torch.empty((pairs, columns), dtype=x.dtype, device=x.device) for columns in (half * 2, width))
    kernels, linear_beta = native.load("mxfp4"), float(activation.linear_beta or 0)
    caps = (activation.name == "situ", float(activation.beta), linear_beta)
    # gate-up reads the table before it waits for the kernel before it: that must not be the sort
    rows = arrange(x)
    kernels.few_gate_up(rows, store.w13_packed, store.w13_scale, order, table, h, top_k, *caps, tile)
    kernels.few_down(h, store.w2_packed, store.w2_scale, order, table, out, tile)
    return out
