"""Routed experts as grouped GEMMs: sort, gate and up with the activation, down, weighted sum. See spec.py for shapes.

The weights of an expert that some token chose cross memory once for each tile of its tokens. As in `ops/linear`, the
products are formed transposed (64 or more weight rows against a tile of tokens): every tile runs on wgmma with one
order over K, so a pair's bits do not depend on the tile, and a token sums its experts in ascending order in fp32.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from anabranch.config.model import ActivationConfig
from anabranch.ops.experts.reference import ExpertBank
from anabranch.ops.experts.tiles import align
from anabranch.ops.glu.triton import activate, activation_constants
from anabranch.ops.linear.triton import token_tile, weight_tile
from anabranch.ops.mxfp4.triton import mxfp4_tile

_SUM_BLOCK = 512


@triton.jit
def _tile_of(table, slot, slots, first, count, ALONE: tl.constexpr):
    """(local expert or a negative number, first pair, end) of one tile; each choice of a lone token is a tile."""
    if ALONE:
        expert = tl.load(table + slot) - first
        return tl.where(expert < count, expert, -1), slot, slot + 1
    else:
        expert = tl.load(table + slot).to(tl.int64)
        return expert, tl.load(table + slots + slot), tl.load(table + 2 * slots + slot)


@triton.jit
def _expert_tile(
    w,
    scale,
    expert,
    known,
    start,
    columns,
    rows,
    K: tl.constexpr,
    FP4: tl.constexpr,
    EVEN: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """A [known, K] tile of a dense [E, rows, columns] stack, or of its MXFP4 codes and scales."""
    if FP4:
        codes = w + expert * rows * (columns // 2)
        return mxfp4_tile(codes, scale + expert * rows * (columns // 32), known, start, columns, K, EVEN, DTYPE)
    else:
        return weight_tile(w + expert * rows * columns, known, start, columns, columns, K, EVEN)


@triton.jit(do_not_specialize=["slots", "first"])
def _gate_up(
    x,
    w,
    scale,
    pairs,
    table,
    h,
    slots,
    first,
    count,
    inner,
    width,
    x_stride,
    ALONE: tl.constexpr,
    FP4: tl.constexpr,
    TOP_K: tl.constexpr,
    SITU: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    T: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    EVEN: tl.constexpr,
):
    expert, begin, end = _tile_of(table, tl.program_id(1), slots, first, count, ALONE)
    if expert < 0:
        return
    place, row = begin + tl.arange(0, T), tl.program_id(0) * R + tl.arange(0, R)
    inside, known = place < end, tl.minimum(row, inner - 1)
    pair = place if ALONE else tl.load(pairs + place, mask=inside, other=0)
    token = pair // TOP_K
    dtype: tl.constexpr = h.dtype.element_ty
    gate, up = tl.zeros((R, T), tl.float32), tl.zeros((R, T), tl.float32)
    for start in range(0, width, K):
        a = _expert_tile(w, scale, expert, known, start, width, 2 * inner, K, FP4, EVEN, dtype)
        b = _expert_tile(w, scale, expert, known + inner, start, width, 2 * inner, K, FP4, EVEN, dtype)
        tokens = token_tile(x, token, inside, start, width, x_stride, K, EVEN)
        gate = tl.dot(a, tokens, gate, input_precision="ieee")
        up = tl.dot(b, tokens, up, input_precision="ieee")
    value = activate(gate.to(dtype), up.to(dtype), SITU, BETA, LINEAR_BETA)
    at = h + place.to(tl.int64)[None, :] * inner + row[:, None]
    tl.store(at, value, mask=inside[None, :] & (row < inner)[:, None])


@triton.jit(do_not_specialize=["slots", "first"])
def _down(
    h,
    w,
    scale,
    pairs,
    table,
    out,
    slots,
    first,
    count,
    inner,
    width,
    ALONE: tl.constexpr,
    FP4: tl.constexpr,
    T: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    EVEN: tl.constexpr,
):
    expert, begin, end = _tile_of(table, tl.program_id(1), slots, first, count, ALONE)
    if expert < 0:
        return
    place, row = begin + tl.arange(0, T), tl.program_id(0) * R + tl.arange(0, R)
    inside, known = place < end, tl.minimum(row, width - 1)
    pair = place if ALONE else tl.load(pairs + place, mask=inside, other=0)
    dtype: tl.constexpr = out.dtype.element_ty
    total = tl.zeros((R, T), tl.float32)
    for start in range(0, inner, K):
        a = _expert_tile(w, scale, expert, known, start, inner, width, K, FP4, EVEN, dtype)
        b = token_tile(h, place, inside, start, inner, inner, K, EVEN)
        total = tl.dot(a, b, total, input_precision="ieee")
    at = out + pair.to(tl.int64)[None, :] * width + row[:, None]
    tl.store(at, total.to(dtype), mask=inside[None, :] & (row < width)[:, None])


@triton.jit(do_not_specialize=["first"])
def _weighted_sum(
    out, weights, experts, y, first, count, width, TOP_K: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    choice = tl.arange(0, CHOICES)
    known = choice < TOP_K
    expert = tl.load(experts + token * TOP_K + choice, mask=known, other=1 << 40)
    local = known & (expert >= first) & (expert < first + count)
    weight = tl.load(weights + token * TOP_K + choice, mask=known, other=0.0)
    # place of each choice in ascending expert order; equal experts keep the order of the choices
    before = (expert[None, :] < expert[:, None]) | (
        (expert[None, :] == expert[:, None]) & (choice[None, :] < choice[:, None])
    )
    order = tl.sum(before.to(tl.int32), 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for n in tl.static_range(TOP_K):
        mine = order == n
        pair = token * TOP_K + tl.sum(tl.where(mine, choice, 0), 0)
        wanted = tl.sum((mine & local).to(tl.int32), 0) > 0
        part = tl.load(out + pair * width + column, mask=wanted & (column < width), other=0.0)
        total += part.to(tl.float32) * tl.sum(tl.where(mine, weight, 0.0), 0)
    tl.store(y + token * width + column, total, mask=column < width)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """T tokens by R weight rows by K columns a step. It sets the speed and never the bits."""

    T: int
    R: int
    K: int
    num_warps: int = 4
    num_stages: int = 4


_FP32 = (Tile(T=16, R=64, K=32, num_stages=2), Tile(T=16, R=64, K=32, num_stages=2))
# most pairs an expert gets on average -> (gate and up, down)
_BF16: tuple[tuple[float, tuple[Tile, Tile]], ...] = (
    (8, (Tile(T=16, R=64, K=64), Tile(T=16, R=64, K=128))),
    (24, (Tile(T=32, R=64, K=64), Tile(T=32, R=64, K=128))),
    (96, (Tile(T=64, R=64, K=64), Tile(T=64, R=128, K=64))),
    (float("inf"), (Tile(T=128, R=128, K=64, num_warps=8, num_stages=3), Tile(T=128, R=128, K=64, num_warps=8))),
)
# 128 columns: four scale bytes a row are the least that an asynchronous copy takes
_MXFP4: tuple[tuple[float, tuple[Tile, Tile]], ...] = (
    (8, (Tile(T=16, R=64, K=128), Tile(T=16, R=64, K=128))),
    (24, (Tile(T=32, R=64, K=128), Tile(T=32, R=64, K=128))),
    (float("inf"), (Tile(T=64, R=128, K=128, num_warps=8, num_stages=3),) * 2),
)
_LONE_TOKEN = (Tile(T=16, R=64, K=128), Tile(T=16, R=64, K=128))


def choose_tiles(tokens: int, top_k: int, experts: int, dtype: torch.dtype, fp4: bool = False) -> tuple[Tile, Tile]:
    """The tiles of both GEMMs, equal in T, from host shapes alone."""
    if dtype == torch.float32:
        return _FP32
    if tokens == 1:
        return _LONE_TOKEN
    return next(tiles for most, tiles in (_MXFP4 if fp4 else _BF16) if tokens * top_k / experts <= most)


def _stacks(bank: ExpertBank) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor], bool]:
    """(gate-up, its scale), (down, its scale) and whether they are MXFP4; a plain stack stands in for its own scale."""
    store: Any = bank
    if hasattr(bank, "w13_packed"):
        return (store.w13_packed, store.w13_scale), (store.w2_packed, store.w2_scale), True
    return (store.w13, store.w13), (store.w2, store.w2), False


def routed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    bank: ExpertBank,
    activation: ActivationConfig,
    tiles: tuple[Tile, Tile] | None = None,
) -> torch.Tensor:
    """sum_e weights_e * down_e(glu(gate_up_e x)) over the local experts: fp32 [T, W].

    Args:
        bank: dense stacks `w13` [E, 2*I, W] and `w2` [E, W, I], or `w13_packed`, `w13_scale`, `w2_packed`, `w2_scale`.
        tiles: measured by benchmarks; None takes the table above.
    """
    (tokens, width), top_k = x.shape, experts.shape[1]
    (w13, w13_scale), (w2, w2_scale), fp4 = _stacks(bank)
    inner, pairs = w13.shape[1] // 2, tokens * top_k
    if not tokens:
        return torch.empty((0, width), dtype=torch.float32, device=x.device)
    wide, narrow = tiles or choose_tiles(tokens, top_k, bank.count, x.dtype, fp4)
    assert wide.T == narrow.T, "both GEMMs walk the same tiles of pairs"
    experts = experts.contiguous()
    alone, order, table, slots = tokens == 1, experts, experts, top_k
    if not alone:
        sorted_pairs = align(experts, bank.first, bank.count, wide.T)
        order, table, slots = sorted_pairs.pairs, sorted_pairs.table, sorted_pairs.slots
    h = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    out = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    sizes, flags = (slots, bank.first, bank.count, inner, width), {"ALONE": alone, "FP4": fp4}
    _gate_up[(triton.cdiv(inner, wide.R), slots)](
        *(x, w13, w13_scale, order, table, h, *sizes, x.stride(0)),
        **flags,
        **activation_constants(activation),
        **_launch(wide, width),
        TOP_K=top_k,
    )
    _down[(triton.cdiv(width, narrow.R), slots)](
        *(h, w2, w2_scale, order, table, out, *sizes), **flags, **_launch(narrow, inner)
    )
    return weighted_sum(out, weights, experts, bank)


def weighted_sum(out: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, bank: ExpertBank) -> torch.Tensor:
    """fp32 [T, W]: sum over the local choices, by ascending expert, of weights [T, k] times out [T * k, W]."""
    (tokens, top_k), width = experts.shape, out.shape[1]
    y = torch.empty((tokens, width), dtype=torch.float32, device=out.device)
    _weighted_sum[(tokens, triton.cdiv(width, _SUM_BLOCK))](
        *(out, weights.contiguous(), experts, y, bank.first, bank.count, width),
        TOP_K=top_k,
        CHOICES=triton.next_power_of_2(top_k),
        BLOCK=_SUM_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,  # a product and a sum, each rounded, as in the reference
    )
    return y


def _launch(tile: Tile, columns: int) -> dict[str, Any]:
    """Launch constants of one GEMM over `columns` columns."""
    sizes = {"T": tile.T, "R": tile.R, "K": tile.K, "num_warps": tile.num_warps, "num_stages": tile.num_stages}
    # tiles of several sizes serve one operation: contracting a multiply-add in one of them only would show in the bits
    return {**sizes, "EVEN": columns % tile.K == 0, "enable_fp_fusion": False}
