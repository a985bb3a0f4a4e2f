"""Prefill in the explicit form on cuDNN's attention kernel, one sequence at a time. See spec.py for shapes.

The kernel knows a causal square and a full rectangle. New tokens meet each other in the square and the context before
them in rectangles of at most STRETCH rows, which bounds the expanded keys and values; parts are merged by the
logarithms of their sums.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from anabranch.ops.early import early_launch, follow
from anabranch.ops.gate.triton import exp32, log32
from anabranch.ops.segments import Segments

STRETCH = 16_384  # context rows expanded at once
MULTIPLE = 64  # of query rows: the library plans anew for every size
_ROWS = 16  # (token, head) rows of one program of the merge
_FETCH, _SPREAD = 4, 64  # latents, and (token, head) keys, that one program moves: 4 and 8 KiB


def mla_prefill(
    q: torch.Tensor,
    segments: Segments,
    block_table: torch.Tensor,
    pages: torch.Tensor,
    kv_b: torch.Tensor,
) -> torch.Tensor:
    """Parts are rounded to the model dtype before they are merged, beyond what the explicit form rounds."""
    nope, lengths = q.shape[-1] - (pages.shape[-1] - kv_b.shape[-1]), list(segments.lengths)
    contexts = [total - length for total, length in zip(segments.totals, lengths, strict=True)]
    # the new tokens of all sequences are expanded together
    keys, values = _expand(list(zip(block_table, contexts, lengths, strict=True)), pages, kv_b, nope)
    parts = zip(q.split(lengths), keys.split(lengths), values.split(lengths), block_table, contexts, strict=True)
    outputs = [_sequence(*part, pages, kv_b, nope) for part in parts]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _sequence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    context: int,
    pages: torch.Tensor,
    kv_b: torch.Tensor,
    nope: int,
) -> torch.Tensor:
    """q, k [n, H, d] and v [n, H, e] of new tokens behind `context` cache rows: [n, H * e]."""
    count, short = len(q), -len(q) % MULTIPLE
    if short:  # behind a causal square's last row more may stand, if it is finite
        q, k, v = (F.pad(t, (0, 0, 0, 0, 0, short)) for t in (q, k, v))
    o, sums = attend(q, k, v, causal=True, sums=context > 0)
    for first in range(0, context, STRETCH):
        stretch = (table, first, min(STRETCH, context - first))
        part, part_sums = attend(q, *_expand([stretch], pages, kv_b, nope), causal=False, sums=True)
        last = first + STRETCH >= context
        o, sums = merge(o, sums, part, part_sums, q.dtype if last else torch.float32)
    return o[:count].flatten(1)


def _expand(
    spans: Sequence[tuple[torch.Tensor, int, int]], pages: torch.Tensor, kv_b: torch.Tensor, nope: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [m, H, nope + rope] and values [m, H, v] of the m cache rows of spans: block table, first row, rows."""
    (heads, columns, rank), width, counts = kv_b.shape, pages.shape[-1], [count for *_, count in spans]
    like: dict[str, Any] = {"dtype": pages.dtype, "device": pages.device}
    latent = torch.empty(sum(counts), rank, **like)
    keys = torch.empty(len(latent), heads, nope + width - rank, **like)
    values = torch.empty(len(latent), heads, columns - nope, **like)
    shared = keys[..., nope:]
    for (table, first, _), rows, tails in zip(spans, latent.split(counts), shared.split(counts), strict=True):
        fetch_rows(pages, table, first, rows, tails)
    # products are written where they belong
    each = latent.expand(heads, -1, -1)
    torch.bmm(each, kv_b[:, :nope].mT, out=keys[..., :nope].transpose(0, 1))
    torch.bmm(each, kv_b[:, nope:].mT, out=values.transpose(0, 1))
    return keys, values


def fetch_rows(pages: torch.Tensor, table: torch.Tensor, first: int, latent: torch.Tensor, tails: torch.Tensor) -> None:
    """Cache rows from `first` on of one sequence: latents [n, r], and their rope columns to every head [n, H, rope]."""
    (count, rank), (_, heads, rope) = latent.shape, tails.shape
    if count == 0:
        return
    spread = triton.cdiv(count * heads, _SPREAD)
    strides = (*pages.stride()[:2], *tails.stride()[:2])
    tile = {"RANK": rank, "ROPE": rope, "WIDE": triton.next_power_of_2(rank), "NARROW": triton.next_power_of_2(rope)}
    _fetch[(spread + triton.cdiv(count, _FETCH),)](
        *(pages, table, table.stride(0), latent, tails, first, count, spread, *strides),
        **(tile | {"PAGE": pages.shape[1], "H": heads, "FETCH": _FETCH, "SPREAD": _SPREAD, "num_warps": 4}),
        **early_launch(),
    )


@triton.jit
def _cache_row(pages, table, entry_stride, first, i, count, page_stride, row_stride, PAGE: tl.constexpr):
    """Where these rows behind `first` start."""
    page = tl.load(table + (first + i) // PAGE * entry_stride, i < count, other=0)
    return pages + page * page_stride + (first + i) % PAGE * row_stride


@triton.jit(do_not_specialize=["first", "count", "spread"], do_not_specialize_on_alignment=["table"])
def _fetch(
    pages, table, entry_stride, latent, tails, first, count, spread, page_stride, row_stride, token_stride, head_stride,
    RANK: tl.constexpr, ROPE: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr, PAGE: tl.constexpr,
    H: tl.constexpr, FETCH: tl.constexpr, SPREAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    follow(EARLY)
    program = tl.program_id(0).to(tl.int64)
    if program < spread:
        pair, narrow = program * SPREAD + tl.arange(0, SPREAD), tl.arange(0, NARROW)[None, :]
        token, head = pair // H, pair % H
        source = _cache_row(pages, table, entry_stride, first, token, count, page_stride, row_stride, PAGE)
        known = (token < count)[:, None] & (narrow < ROPE)
        key = tl.load(source[:, None] + RANK + narrow, known)
        tl.store(tails + (token * token_stride + head * head_stride)[:, None] + narrow, key, known)
    else:
        i, wide = (program - spread) * FETCH + tl.arange(0, FETCH), tl.arange(0, WIDE)[None, :]
        at = _cache_row(pages, table, entry_stride, first, i, count, page_stride, row_stride, PAGE)
        inside = (i < count)[:, None] & (wide < RANK)
        tl.store(latent + (i * RANK)[:, None] + wide, tl.load(at[:, None] + wide, inside), inside)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, sums: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [n, H, d], k [m, H, d], v [m, H, e] -> o [n, H, e] and, asked for, ln sum exp of the scores, fp32 [H, n]."""
    batched = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    o, logs, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*batched, None, sums, 0.0, causal)
    return o[0].transpose(0, 1), logs.view(q.shape[1], len(q)) if sums else logs


def merge(
    a: torch.Tensor, a_sums: torch.Tensor, b: torch.Tensor, b_sums: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two sets of keys from the attention over each: outputs [n, H, e], sums fp32 [H, n]."""
    count, heads, width = a.shape
    y, sums = torch.empty(a.shape, dtype=dtype, device=a.device), torch.empty_like(a_sums)
    grid = (triton.cdiv(count * heads, _ROWS),)
    strides = (*a.stride()[:2], *b.stride()[:2])
    block = triton.next_power_of_2(width)
    _merge[grid](a, a_sums, b, b_sums, y, sums, count, *strides, H=heads, V=width, ROWS=_ROWS, BLOCK=block, num_warps=4)
    return y, sums


@triton.jit(do_not_specialize=["T"])
def _merge(
    a, a_sums, b, b_sums, y, sums, T, a_token, a_head, b_token, b_head,
    H: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    t, h, c = row // H, row % H, tl.arange(0, BLOCK)
    real = t < T
    inside = real[:, None] & (c < V)[None, :]
    left = tl.load(a_sums + h * T + t, real, other=0.0)
    right = tl.load(b_sums + h * T + t, real, other=0.0)
    best = tl.maximum(left, right)
    p, q = exp32(left - best), exp32(right - best)
    x = tl.load(a + (t * a_token + h * a_head)[:, None] + c[None, :], inside, other=0.0).to(tl.float32)
    z = tl.load(b + (t * b_token + h * b_head)[:, None] + c[None, :], inside, other=0.0).to(tl.float32)
    mixed = (x * p[:, None] + z * q[:, None]) / (p + q)[:, None]
    tl.store(y + (row * V)[:, None] + c[None, :], mixed.to(y.dtype.element_ty), inside)
    tl.store(sums + h * T + t, best + log32(p + q), real)
