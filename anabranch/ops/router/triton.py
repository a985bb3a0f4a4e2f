"""The router as two Triton launches: fp32 logits over fixed segments of the width, then one program a token chooses.

A segment is summed on its own and the segments are added in ascending order, whether one program sums them all (many
tokens) or each has its own program (few): a token's bits do not depend on the batch. See spec.py for shapes.
"""

import torch
import triton
import triton.language as tl

from anabranch.config.model import MoeConfig
from anabranch.ops.gate.triton import exp32, sigmoid32
from anabranch.ops.linear.triton import token_tile, weight_tile

_EXPERTS = 64  # rows of one program: the least that wgmma takes
_SEGMENT = 256
_SPLIT_TOKENS = 128  # up to here every segment has its own program


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
    SEGMENT: tl.constexpr,
    EVEN: tl.constexpr,
):
    token, row = tl.program_id(1) * T + tl.arange(0, T), tl.program_id(0) * R + tl.arange(0, R)
    part = tl.program_id(2)
    inside, known = token < tokens, tl.minimum(row, experts - 1)
    first, last = part * SEGMENT, tl.minimum((part + 1) * SEGMENT, width) if SPLIT else width
    K: tl.constexpr = SEGMENT // 2
    total = tl.zeros((R, T), tl.float32)
    for start in range(first, last, SEGMENT):
        # two products a segment: a lone one would be folded into `total` and change the order of addition
        a = weight_tile(weight, known, start, width, w_stride, K, EVEN)
        b = token_tile(x, token, inside, start, width, x_stride, K, EVEN)
        segment = tl.dot(a, b, input_precision="ieee")
        a = weight_tile(weight, known, start + K, width, w_stride, K, EVEN)
        b = token_tile(x, token, inside, start + K, width, x_stride, K, EVEN)
        total += tl.dot(a, b, segment, input_precision="ieee")
    at = parts + (part.to(tl.int64) * tokens + token)[None, :] * experts + row[:, None]
    tl.store(at, total, mask=inside[None, :] & (row < experts)[:, None])


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
    E: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    e, choice = tl.arange(0, E), tl.arange(0, CHOICES)
    inside = e < experts
    logits = tl.zeros((E,), tl.float32)
    for part in tl.static_range(PARTS):
        logits += tl.load(parts + (tokens * part + token) * experts + e, mask=inside, other=0.0)
    if SIGMOID:
        scores = sigmoid32(logits)
    else:
        logits = tl.where(inside, logits, float("-inf"))
        raised = exp32(logits - tl.max(logits, 0))
        scores = raised / tl.sum(raised, 0)
    biased = tl.where(inside, scores + tl.load(bias + e, mask=inside, other=0.0), float("-inf"))
    picked, values = tl.zeros((CHOICES,), tl.int32), tl.zeros((CHOICES,), tl.float32)
    for n in tl.static_range(TOP_K):
        best = tl.argmax(biased, 0, tie_break_left=True)
        picked = tl.where(choice == n, best, picked)
        values = tl.where(choice == n, tl.sum(tl.where(e == best, scores, 0.0), 0), values)
        biased = tl.where(e == best, float("-inf"), biased)
    if RENORMALIZE:
        values = values / (tl.sum(values, 0) + 1e-20)
    at = token * TOP_K + choice
    tl.store(weights + at, values * scaling, mask=choice < TOP_K)
    tl.store(chosen + at, picked.to(tl.int64), mask=choice < TOP_K)


def _partial_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """fp32 [parts, T, E]; the logits are their sum in ascending order."""
    (tokens, width), experts = x.shape, weight.shape[0]
    split = tokens <= _SPLIT_TOKENS
    count = triton.cdiv(width, _SEGMENT) if split else 1
    parts = torch.empty((count, tokens, experts), dtype=torch.float32, device=x.device)
    tile = 16 if x.dtype == torch.float32 else min(64, max(16, triton.next_power_of_2(tokens)))
    grid = (triton.cdiv(experts, _EXPERTS), triton.cdiv(tokens, tile), count)
    sizes = (tokens, experts, width, x.stride(0), weight.stride(0))
    blocks = {"T": tile, "R": _EXPERTS, "SEGMENT": _SEGMENT, "EVEN": width % _SEGMENT == 0}
    stages = 2 if split or x.dtype == torch.float32 else 3
    _logits[grid](x, weight, parts, *sizes, SPLIT=split, **blocks, num_warps=4, num_stages=stages)
    return parts


def route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, moe: MoeConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose by score + bias (the lower index wins a tie), weigh by the unbiased score: fp32 and int64 [T, k]."""
    if moe.groups != 1:
        raise ValueError(f"the Triton router knows one expert group only, got groups={moe.groups}")
    tokens, experts = x.shape[0], weight.shape[0]
    weights = torch.empty((tokens, moe.top_k), dtype=torch.float32, device=x.device)
    chosen = torch.empty((tokens, moe.top_k), dtype=torch.int64, device=x.device)
    if tokens:
        parts = _partial_logits(x, weight)
        flags = {"SIGMOID": moe.scoring == "sigmoid", "RENORMALIZE": moe.renormalize and moe.top_k > 1}
        blocks = {"CHOICES": triton.next_power_of_2(moe.top_k), "E": triton.next_power_of_2(experts)}
        constants = {"PARTS": parts.shape[0], "TOP_K": moe.top_k, **blocks, **flags}
        warps = 1 if experts <= 256 else 4
        _choose[(tokens,)](
            parts, bias, weights, chosen, tokens, experts, float(moe.scaling), **constants, num_warps=warps
        )
    return weights, chosen
