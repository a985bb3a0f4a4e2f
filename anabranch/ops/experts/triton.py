"""Routed experts as grouped GEMMs: gate and up with the activation, down, weighted sum. See spec.py for shapes.

The weights of an expert that some token chose cross memory once for each tile of its tokens. As in `ops/linear`, the
products are formed transposed, so every tile runs on wgmma with one order over K, and a pair's bits do not depend on
it. A shared expert can ride in the same two launches; its products sum K in the segments of `ops/linear`, as alone.
Where `grouped`, `stream` or `ops/mxfp4/cuda` are worth it they run instead, with the same bits.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from anabranch.config.model import ActivationConfig
from anabranch.ops.early import early_launch, follow
from anabranch.ops.expert_sum.triton import expert_sum
from anabranch.ops.experts import grouped, stream
from anabranch.ops.experts.plan import SORTED, Plan, Tile, choose_plan
from anabranch.ops.experts.reference import ExpertBank, stacks
from anabranch.ops.experts.tiles import align
from anabranch.ops.experts.triton_products import matrix, members, shared_pair, shared_product
from anabranch.ops.experts.triton_tiles import down_sorted, down_tile, gate_up_sorted, gate_up_tile, store_hidden
from anabranch.ops.glu.triton import activation_constants
from anabranch.ops.linear.triton import segments
from anabranch.ops.mxfp4 import cuda as mxfp4
from anabranch.ops.mxfp4.triton import ARRANGED, BLOCK, PLAIN, arrange, tile_form

_SHARED_K = 64  # columns a step of the shared expert: divides its segments


@triton.jit(do_not_specialize=["tokens", "slots", "first", "riders"])
def _gate_up(
    x,
    w,
    scale,
    experts,
    pairs,
    table,
    h,
    rider_x,
    rider_w,
    rider_h,
    tokens,
    slots,
    first,
    count,
    inner,
    width,
    x_stride,
    riders,
    rider_inner,
    rider_width,
    rider_stride,
    MODE: tl.constexpr,
    FP4: tl.constexpr,
    H_ARRANGED: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    SITU: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    T: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    STACKED: tl.constexpr,
    EVEN: tl.constexpr,
    TAIL: tl.constexpr,
    RIDER: tl.constexpr,
    RIDER_K: tl.constexpr,
    RIDER_S: tl.constexpr,
    RIDER_EVEN: tl.constexpr,
    EARLY: tl.constexpr,
):
    follow(EARLY)
    program = tl.program_id(0)
    if RIDER:
        if program < riders:
            blocks = tl.cdiv(rider_inner, R)
            row0 = program % blocks * R
            token = program // blocks * T + tl.arange(0, T)
            gate, up = shared_pair(
                *(rider_w, rider_width, row0, rider_inner, rider_x, token, token < tokens, rider_stride),
                *(R, RIDER_K, RIDER_S, RIDER_EVEN),
            )
            store_hidden(gate, up, rider_h, token, token < tokens, row0, rider_inner, False, SITU, BETA, LINEAR_BETA)
            return
        program -= riders
    if MODE == 0:
        gate_up_sorted(
            *(x, w, scale, pairs, table, h, program, slots, inner, width, x_stride),
            *(FP4, H_ARRANGED, TOP_K, SITU, BETA, LINEAR_BETA, T, R, K, STACKED, TAIL, EVEN),
        )
    else:
        blocks = tl.cdiv(inner, R)
        row0, slot = program % blocks * R, program // blocks
        expert, place, inside = members(experts, slot, tokens, first, count, MODE, TOP_K, CHOICES, T)
        if expert < 0:
            return
        weights = matrix(w, expert, 2 * inner, width, 2 if FP4 else 1)
        scales = matrix(scale, expert, 2 * inner, width, 32 if FP4 else 1)
        gate_up_tile(
            *(x, weights, scales, pairs, h, place, inside, 0, row0, inner, width, x_stride),
            *(MODE, FP4, H_ARRANGED, TOP_K, SITU, BETA, LINEAR_BETA, R, K, STACKED, 0, EVEN),
        )


@triton.jit(do_not_specialize=["tokens", "slots", "first", "riders"])
def _down(
    h,
    w,
    scale,
    experts,
    pairs,
    table,
    out,
    rider_h,
    rider_w,
    rider_out,
    tokens,
    slots,
    first,
    count,
    inner,
    width,
    riders,
    rider_inner,
    rider_width,
    rider_stride,
    MODE: tl.constexpr,
    FP4: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    T: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    EVEN: tl.constexpr,
    TAIL: tl.constexpr,
    RIDER: tl.constexpr,
    RIDER_K: tl.constexpr,
    RIDER_S: tl.constexpr,
    RIDER_EVEN: tl.constexpr,
    EARLY: tl.constexpr,
):
    program = tl.program_id(0)
    dtype: tl.constexpr = out.dtype.element_ty
    if RIDER:
        if program < riders:
            blocks = tl.cdiv(rider_width, R)
            row, token = program % blocks * R + tl.arange(0, R), program // blocks * T + tl.arange(0, T)
            known = tl.minimum(row, rider_width - 1)
            follow(EARLY)
            total = shared_product(
                rider_w, rider_inner, known, rider_h, token, token < tokens, RIDER_K, RIDER_S, RIDER_EVEN
            )
            at = rider_out + token.to(tl.int64)[None, :] * rider_stride + row[:, None]
            tl.store(at, total.to(dtype), mask=(token < tokens)[None, :] & (row < rider_width)[:, None])
            return
        program -= riders
    if MODE == 0:
        follow(EARLY)
        down_sorted(*(h, w, scale, pairs, table, out, program, slots, inner, width, FP4, T, R, K, TAIL, EVEN))
    else:
        blocks = tl.cdiv(width, R)
        row, slot = program % blocks * R + tl.arange(0, R), program // blocks
        # the choice was made by the last but one kernel, or earlier: it may be read at once
        expert, place, inside = members(experts, slot, tokens, first, count, MODE, TOP_K, CHOICES, T)
        follow(EARLY)
        if expert < 0:
            return
        weights = matrix(w, expert, width, inner, 2 if FP4 else 1)
        scales = matrix(scale, expert, width, inner, 32 if FP4 else 1)
        down_tile(*(h, weights, scales, pairs, out, place, inside, 0, row, inner, width, MODE, FP4, K, 0, EVEN))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rider:
    """A shared expert in the same launches: x [T, V], gate|up [2*J, V], down [V, J], and its output [T, V]."""

    x: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    out: torch.Tensor

    @property
    def inner(self) -> int:
        return self.down.shape[1]


def routed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    bank: ExpertBank,
    activation: ActivationConfig,
    plan: Plan | None = None,
) -> torch.Tensor:
    """sum_e weights_e * down_e(glu(gate_up_e x)) over the local experts: fp32 [T, W].

    Args:
        bank: dense stacks `w13` [E, 2*I, W] and `w2` [E, W, I], or `w13_packed`, `w13_scale`, `w2_packed`, `w2_scale`.
        plan: measured by benchmarks; None takes the tables.
    """
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if len(x):
        out = expert_products(x, experts.contiguous(), bank, activation, plan)
        expert_sum(out, weights, experts, bank.first, bank.count, y)
    return y


def expert_products(
    x: torch.Tensor,
    experts: torch.Tensor,
    bank: ExpertBank,
    activation: ActivationConfig,
    plan: Plan | None = None,
    rider: Rider | None = None,
) -> torch.Tensor:
    """down_e(glu(gate_up_e x)) of every local (token, choice) pair: [T * k, W]; other ranks' rows stay as they are."""
    (tokens, width), top_k = x.shape, experts.shape[1]
    for kernels in () if plan or rider else (grouped, stream, mxfp4):
        if kernels.worth(x, top_k, bank):
            return kernels.expert_products(x, experts, bank, activation)
    (w13, w13_scale), (w2, w2_scale), fp4 = stacks(bank)
    inner, pairs = w13.shape[1] // 2, tokens * top_k
    plan = plan or choose_plan(tokens, top_k, bank.total, x.dtype, fp4)
    mode, order, table, slots = plan.mode(tokens), experts, experts, pairs
    if mode == SORTED:
        made = align(experts, bank.first, bank.count, plan.T, plan.tail)
        order, table, slots = made.pairs, made.table, made.slots
    outer, hidden = (tile_form(columns, x.dtype) if fp4 else PLAIN for columns in (width, inner))
    if max(outer, hidden) >= ARRANGED and {plan.wide.K, plan.narrow.K} != {BLOCK}:
        raise ValueError(f"experts: MXFP4 tiles take {BLOCK} columns a step, got {plan.wide.K} and {plan.narrow.K}")
    x = arrange(x) if outer >= ARRANGED else x
    h = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    out = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    sizes = (tokens, slots, bank.first, bank.count, inner, width)
    flags = {"MODE": mode, "TOP_K": top_k, "CHOICES": triton.next_power_of_2(top_k), **early_launch()}
    flags["TAIL"] = plan.tail if mode == SORTED else 0
    wide, narrow, (a, b) = plan.wide, plan.narrow, _riding(rider, plan, tokens, h)
    _gate_up[(a.programs + triton.cdiv(inner, wide.R) * slots,)](
        *(x, w13, w13_scale, experts, order, table, h, *a.tensors, *sizes, x.stride(0), *a.sizes),
        **(flags | activation_constants(activation) | _launch(wide, width) | a.flags),
        STACKED=wide.stacked,
        FP4=outer,
        H_ARRANGED=hidden >= ARRANGED,
    )
    _down[(b.programs + triton.cdiv(width, narrow.R) * slots,)](
        *(h, w2, w2_scale, experts, order, table, out, *b.tensors, *sizes, *b.sizes),
        **(flags | _launch(narrow, inner) | b.flags),
        FP4=hidden,
    )
    return out


@dataclass(frozen=True, kw_only=True, slots=True)
class _Riding:
    """A rider's part of one launch: its programs, which come first, its tensors, and its sizes."""

    programs: int
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    sizes: tuple[int, ...]
    flags: dict[str, Any]


def _riding(rider: Rider | None, plan: Plan, tokens: int, stand_in: torch.Tensor) -> tuple[_Riding, _Riding]:
    """Of the gate-up launch and of the down launch."""
    if rider is None:
        flags = {"RIDER": False, "RIDER_K": 16, "RIDER_S": 1, "RIDER_EVEN": True}
        none = _Riding(programs=0, tensors=(stand_in,) * 3, sizes=(0, 0, 0, 0), flags=flags)
        return none, none
    width, tiles = rider.x.shape[1], triton.cdiv(tokens, plan.T)
    h = torch.empty((tokens, rider.inner), dtype=rider.x.dtype, device=rider.x.device)
    gate_up = _Riding(
        programs=triton.cdiv(rider.inner, plan.wide.R) * tiles,
        tensors=(rider.x, rider.gate_up, h),
        sizes=(triton.cdiv(rider.inner, plan.wide.R) * tiles, rider.inner, width, rider.x.stride(0)),
        flags=_rider_flags(rider.gate_up, plan),
    )
    down = _Riding(
        programs=triton.cdiv(width, plan.narrow.R) * tiles,
        tensors=(h, rider.down, rider.out),
        sizes=(triton.cdiv(width, plan.narrow.R) * tiles, rider.inner, width, rider.out.stride(0)),
        flags=_rider_flags(rider.down, plan),
    )
    return gate_up, down


def _rider_flags(w: torch.Tensor, plan: Plan) -> dict[str, Any]:
    columns, k = w.shape[1], min(_SHARED_K, plan.wide.K)
    parts = segments(columns)
    return {"RIDER": True, "RIDER_K": k, "RIDER_S": parts, "RIDER_EVEN": columns // parts % k == 0}


def _launch(tile: Tile, columns: int) -> dict[str, Any]:
    """Launch constants of one GEMM over `columns` columns."""
    sizes = {"T": tile.T, "R": tile.R, "K": tile.K, "num_warps": tile.num_warps, "num_stages": tile.num_stages}
    # tiles of several sizes serve one operation: contracting a multiply-add in one of them only would show in the bits
    return {**sizes, "EVEN": columns % tile.K == 0, "enable_fp_fusion": False}
