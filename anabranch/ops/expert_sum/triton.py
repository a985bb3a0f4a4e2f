"""The sum over experts as one Triton launch. See spec.py for shapes."""

import torch
import triton
import triton.language as tl

from anabranch.ops.early import early_launch, follow

_COLUMNS = 512  # of a program
# up to here a program has four warps; above two, and addends leave the cache first: only y is read again
_FEW_TOKENS = 128


@triton.jit
def _order_of(experts, weights, token, first, count, TOP_K: tl.constexpr, CHOICES: tl.constexpr):
    """Expert, weight and place in ascending expert order of each choice, and which are local.

    Equal experts keep the order of the choices.
    """
    choice = tl.arange(0, CHOICES)
    known = choice < TOP_K
    expert = tl.load(experts + token * TOP_K + choice, mask=known, other=1 << 40)
    weight = tl.load(weights + token * TOP_K + choice, mask=known, other=0.0)
    before = (expert[None, :] < expert[:, None]) | (
        (expert[None, :] == expert[:, None]) & (choice[None, :] < choice[:, None])
    )
    return tl.sum(before.to(tl.int32), 1), weight, known & (expert >= first) & (expert < first + count)


@triton.jit(do_not_specialize=["first"])
def _expert_sum(
    out,
    weights,
    experts,
    y,
    shared,
    first,
    count,
    width,
    y_stride,
    shared_stride,
    SHARED: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    EVICT: tl.constexpr,
    EARLY: tl.constexpr,
):
    follow(EARLY)
    token, choice = tl.program_id(0).to(tl.int64), tl.arange(0, CHOICES)
    order, weight, local = _order_of(experts, weights, token, first, count, TOP_K, CHOICES)
    choice = tl.where(local, choice, -1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for n in tl.static_range(TOP_K):
        mine = order == n
        place, factor = tl.sum(tl.where(mine, choice, 0), 0), tl.sum(tl.where(mine, weight, 0.0), 0)
        at = out + (token * TOP_K + place) * width + column
        part = tl.load(at, mask=(place >= 0) & inside, other=0.0, eviction_policy=EVICT)
        total += part.to(tl.float32) * factor
    value = total.to(y.dtype.element_ty)
    if SHARED:
        added = tl.load(shared + token * shared_stride + column, mask=inside, other=0.0, eviction_policy=EVICT)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
    tl.store(y + token * y_stride + column, value, mask=inside)


def expert_sum(
    out: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    first: int,
    count: int,
    y: torch.Tensor,
    shared: torch.Tensor | None = None,
) -> None:
    """Writes y."""
    (tokens, top_k), width = experts.shape, out.shape[1]
    few, added = tokens <= _FEW_TOKENS, y if shared is None else shared
    _expert_sum[(tokens, triton.cdiv(width, _COLUMNS))](
        *(out, weights.contiguous(), experts.contiguous(), y, added, first, count, width, y.stride(0)),
        added.stride(0),
        SHARED=shared is not None,
        TOP_K=top_k,
        CHOICES=triton.next_power_of_2(top_k),
        BLOCK=_COLUMNS,
        EVICT="" if few else "evict_first",
        num_warps=4 if few else 2,
        enable_fp_fusion=False,  # a product and a sum, each rounded, as in the reference
        **early_launch(),
    )
