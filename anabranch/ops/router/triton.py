"""The router: fp32 logits over fixed segments of the width, then the choice. See spec.py for shapes.

A segment is summed on its own and the segments are added in ascending order, whether one program sums them all (many
tokens) or each has its own program (few): a token's bits do not depend on the batch. For a handful of tokens it is one
launch, in which the program that arrives last chooses for all of them.
"""

import torch
import triton
import triton.language as tl

from anabranch.config.model import MoeConfig
from anabranch.ops.early import early_launch, follow, prefetch_l2
from anabranch.ops.gate.triton import exp32, sigmoid32
from anabranch.ops.linear.triton import token_tile, weight_tile
from anabranch.ops.router.plan import SEGMENT, SPLIT_TOKENS, logit_tile

_SCORES = 1024  # scores that a program holds while it chooses; up to here one launch is faster than two
_LEAST = 4  # tokens that a program chooses for: a row for each warp
_CUT = 128  # experts that one warp compares at once while four choose together


@triton.jit
def _store_logits(
    x,
    weight,
    parts,
    tokens,
    experts,
    width,
    x_stride,
    w_stride,
    SPLIT: tl.constexpr,
    T: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    SEGMENT: tl.constexpr,
    EVEN: tl.constexpr,
):
    token, row = tl.program_id(1) * T + tl.arange(0, T), tl.program_id(0) * R + tl.arange(0, R)
    part = tl.program_id(2)
    inside, known = token < tokens, tl.minimum(row, experts - 1)
    first, last = part * SEGMENT, tl.minimum((part + 1) * SEGMENT, width) if SPLIT else width
    PRODUCTS: tl.constexpr = SEGMENT // K
    total = tl.zeros((R, T), tl.float32)
    if PRODUCTS == 2:
        for start in range(first, last, SEGMENT):
            # two products a segment: a lone one would be folded into `total` and change the order of addition
            a = weight_tile(weight, known, start, width, w_stride, K, EVEN)
            b = token_tile(x, token, inside, start, width, x_stride, K, EVEN)
            segment = tl.dot(a, b, input_precision="ieee")
            a = weight_tile(weight, known, start + K, width, w_stride, K, EVEN)
            b = token_tile(x, token, inside, start + K, width, x_stride, K, EVEN)
            total += tl.dot(a, b, segment, input_precision="ieee")
    else:
        segment = tl.zeros((R, T), tl.float32)
        for step in range(width // K):  # of an even width; loads run ahead across the ends of segments
            a = weight_tile(weight, known, step * K, width, w_stride, K, EVEN)
            b = token_tile(x, token, inside, step * K, width, x_stride, K, EVEN)
            segment = tl.dot(a, b, segment, input_precision="ieee")
            if step % PRODUCTS == PRODUCTS - 1:
                total += segment
                segment = tl.zeros((R, T), tl.float32)
    at = parts + (part.to(tl.int64) * tokens + token)[None, :] * experts + row[:, None]
    tl.store(at, total, mask=inside[None, :] & (row < experts)[:, None])


@triton.jit
def fold_rows(values):
    """Sums of the rows of [B, <= 1024] by halving: an order of addition that no layout changes."""
    for _ in tl.static_range(10):
        if values.shape[1] > 1:
            values = tl.sum(tl.reshape(values, (values.shape[0], 2, values.shape[1] // 2)), 1)
    return tl.reshape(values, (values.shape[0],))


@triton.jit
def _sum_parts(parts, token, e, inside, tokens, experts, PARTS: tl.constexpr):
    """The logits of these (token, expert) pairs, which other programs may have written: past the first-level cache."""
    at = parts + token * experts + e
    logits = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    for part in tl.static_range(1, PARTS):
        logits += tl.load(at + part * tokens * experts, mask=inside, other=0.0, cache_modifier=".cg")
    return logits


@triton.jit
def _order(values):
    """int32 keys in the order of fp32 values, all above -2^31; NaN is above everything, as a sort has it."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), -0x7FFFFFFF)


@triton.jit
def _largest(key, index, N: tl.constexpr, WIDTH: tl.constexpr):
    """The N largest keys of each row, in order, the lower index first among equals: keys and indices [rows, WIDTH]."""
    least: tl.constexpr = -0x80000000
    place = tl.arange(0, WIDTH)[None, :]
    keys, found = tl.full((key.shape[0], WIDTH), least, tl.int32), tl.zeros((key.shape[0], WIDTH), tl.int32)
    for n in tl.static_range(N):
        best = tl.max(key, 1)[:, None]
        at = tl.min(tl.where(key == best, index, 0x7FFFFFFF), 1)[:, None]
        keys, found = tl.where(place == n, best, keys), tl.where(place == n, at, found)
        key = tl.where(index == at, least, key)
    return keys, found


@triton.jit
def _side_by_side(lines, CUTS: tl.constexpr):
    """[CUTS * B, C], whose line `cut * B + b` is a stretch of row b, as [B, CUTS * C]."""
    B: tl.constexpr = lines.shape[0] // CUTS
    cut = tl.reshape(lines, (CUTS, B, lines.shape[1]))
    return tl.reshape(tl.permute(cut, (1, 0, 2)), (B, CUTS * lines.shape[1]))


@triton.jit
def _choose_rows(
    parts,
    bias,
    weights,
    chosen,
    first,
    tokens,
    experts,
    scaling,
    PARTS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    B: tl.constexpr,
    E: tl.constexpr,
    CUTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """Choose for B tokens: the best of each of CUTS stretches of experts, then the best of those.

    With 4 warps and B a multiple of 4 each warp has whole rows: a maximum is one instruction and waits for nobody.
    """
    COLUMNS: tl.constexpr = E // CUTS
    line = tl.arange(0, CUTS * B)[:, None]
    token, e = first.to(tl.int64) + line % B, line // B * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    known = e < experts
    logits = _sum_parts(parts, token, e, known & (token < tokens), tokens, experts, PARTS)
    if SIGMOID:
        scores = sigmoid32(logits)
    else:
        rows = _side_by_side(tl.where(known, logits, float("-inf")), CUTS)
        top = tl.max(rows, 1)[:, None]
        raised = exp32(rows - top)
        total = fold_rows(raised)[:, None]
        scores = tl.reshape(tl.permute(tl.reshape(raised / total, (B, CUTS, COLUMNS)), (1, 0, 2)), (CUTS * B, COLUMNS))
    biased = scores + tl.load(bias + e, mask=known, other=0.0)
    key, picked = _largest(tl.where(known, _order(biased), -0x80000000), e, TOP_K, CHOICES)
    if CUTS > 1:
        key, picked = _largest(_side_by_side(key, CUTS), _side_by_side(picked, CUTS), TOP_K, CHOICES)
    token, place = first.to(tl.int64) + tl.arange(0, B)[:, None], tl.arange(0, CHOICES)[None, :]
    wanted = (token < tokens) & (place < TOP_K)
    weight = _sum_parts(parts, token, picked, wanted, tokens, experts, PARTS)
    weight = sigmoid32(weight) if SIGMOID else exp32(weight - top) / total
    if RENORMALIZE:
        weight = weight / (fold_rows(tl.where(wanted, weight, 0.0)) + 1e-20)[:, None]
    tl.store(weights + token * TOP_K + place, weight * scaling, mask=wanted)
    tl.store(chosen + token * TOP_K + place, picked.to(tl.int64), mask=wanted)


@triton.jit(do_not_specialize=["tokens"])
def _logits(
    x,
    weight,
    parts,
    tokens,
    experts,
    width,
    x_stride,
    w_stride,
    SPLIT: tl.constexpr,
    T: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    SEGMENT: tl.constexpr,
    EVEN: tl.constexpr,
    EARLY: tl.constexpr,
):
    follow(EARLY)
    _store_logits(x, weight, parts, tokens, experts, width, x_stride, w_stride, SPLIT, T, R, K, SEGMENT, EVEN)


@triton.jit(do_not_specialize=["tokens"])
def _choose(
    parts,
    bias,
    weights,
    chosen,
    tokens,
    experts,
    scaling,
    PARTS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    B: tl.constexpr,
    E: tl.constexpr,
    CUTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EARLY: tl.constexpr,
):
    follow(EARLY)
    first = tl.program_id(0) * B
    out = (weights, chosen)
    _choose_rows(
        parts, bias, *out, first, tokens, experts, scaling, PARTS, TOP_K, CHOICES, B, E, CUTS, SIGMOID, RENORMALIZE
    )


@triton.jit(do_not_specialize=["tokens"])
def _route(
    x,
    weight,
    bias,
    parts,
    arrived,
    weights,
    chosen,
    tokens,
    experts,
    width,
    x_stride,
    w_stride,
    scaling,
    T: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    SEGMENT: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    B: tl.constexpr,
    E: tl.constexpr,
    CUTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY and EVEN:  # the weights do not depend on the kernel before
        row = tl.minimum(tl.program_id(0) * R + tl.arange(0, R), experts - 1)
        at = weight + row.to(tl.int64) * w_stride + tl.program_id(2) * SEGMENT
        prefetch_l2(at, SEGMENT * weight.dtype.element_ty.primitive_bitwidth // 8)
    follow(EARLY)
    _store_logits(x, weight, parts, tokens, experts, width, x_stride, w_stride, True, T, R, K, SEGMENT, EVEN)
    tl.debug_barrier()  # every thread's logits before this program's arrival
    if tl.atomic_add(arrived, 1, sem="acq_rel") == tl.num_programs(0) * tl.num_programs(2) - 1:
        tl.store(arrived, 0)
        first, out = tl.program_id(1), (weights, chosen)  # all tokens are in one tile, so 0
        _choose_rows(
            parts, bias, *out, first, tokens, experts, scaling, PARTS, TOP_K, CHOICES, B, E, CUTS, SIGMOID, RENORMALIZE
        )


def _choice(moe: MoeConfig, tokens: int, experts: int) -> dict[str, int | bool]:
    """Launch constants of the choice for `tokens` tokens, each row of scores in stretches of 128."""
    padded = triton.next_power_of_2(experts)
    flags = {"SIGMOID": moe.scoring == "sigmoid", "RENORMALIZE": moe.renormalize and moe.top_k > 1}
    blocks = {"B": triton.next_power_of_2(tokens), "E": padded, "CUTS": max(1, padded // _CUT)}
    return {"TOP_K": moe.top_k, "CHOICES": triton.next_power_of_2(moe.top_k), **blocks, **flags}


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    moe: MoeConfig,
    sync: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose by score + bias (the lower index wins a tie), weigh by the unbiased score: fp32 and int64 [T, k]."""
    if moe.groups != 1:
        raise ValueError(f"the Triton router knows one expert group only, got groups={moe.groups}")
    (tokens, width), experts = x.shape, weight.shape[0]
    weights = torch.empty((tokens, moe.top_k), dtype=torch.float32, device=x.device)
    chosen = torch.empty((tokens, moe.top_k), dtype=torch.int64, device=x.device)
    if not tokens:
        return weights, chosen
    split, tile = tokens <= SPLIT_TOKENS, logit_tile(tokens, experts, width, x.itemsize)
    count = triton.cdiv(width, SEGMENT) if split else 1
    parts = torch.empty((count, tokens, experts), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(experts, tile.R), triton.cdiv(tokens, tile.T), count)
    sizes, scaling = (tokens, experts, width, x.stride(0), weight.stride(0)), float(moe.scaling)
    blocks = {"T": tile.T, "R": tile.R, "K": tile.K, "SEGMENT": SEGMENT, "EVEN": width % SEGMENT == 0, **early_launch()}
    rows = max(_LEAST, tokens)
    if sync is not None and rows * triton.next_power_of_2(experts) <= _SCORES and grid[1] == 1:
        args, choice = (x, weight, bias, parts, sync, weights, chosen), _choice(moe, rows, experts)
        _route[grid](*args, *sizes, scaling, **blocks, **choice, PARTS=count, num_warps=4)
        return weights, chosen
    _logits[grid](x, weight, parts, *sizes, SPLIT=split, **blocks, num_warps=tile.warps, num_stages=tile.stages)
    args, choice = (parts, bias, weights, chosen, tokens, experts, scaling), _choice(moe, 1, experts) | {"CUTS": 1}
    _choose[(tokens,)](*args, **choice, **early_launch(), PARTS=count, num_warps=1)
    return weights, chosen
