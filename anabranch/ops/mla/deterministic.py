"""Latent attention with one form and one order of addition for prefill and decode alike.

Every query uses the absorbed form over blocks of 64 cache rows, in order, with a running maximum. A query's bits
depend on its own rows alone: a block that it may not see, or sees in part, adds exact zeros.
"""

from collections.abc import Sequence
from functools import partial

import torch

from anabranch.ops.arithmetic import fold_sum
from anabranch.ops.linear.deterministic import batched_linear
from anabranch.ops.mla import reference
from anabranch.ops.mla.reference import cached_rows
from anabranch.ops.segments import Segments

BLOCK = 64
PRODUCTS = 1 << 22  # most fp32 products held at once

mla_write = partial(reference.mla_write, total=fold_sum)


def mla_prefill(
    q: torch.Tensor,
    segments: Segments,
    block_table: torch.Tensor,
    pages: torch.Tensor,
    kv_b: torch.Tensor,
) -> torch.Tensor:
    """See spec.py; equal to as many decode steps, bit for bit."""
    return _attend(q, segments.lengths, segments.totals, block_table, pages, kv_b)


def mla_decode(
    q: torch.Tensor,
    totals: torch.Tensor,
    block_table: torch.Tensor,
    pages: torch.Tensor,
    kv_b: torch.Tensor,
) -> torch.Tensor:
    """See spec.py."""
    return _attend(q, [1] * len(q), totals.tolist(), block_table, pages, kv_b)


def _attend(
    q: torch.Tensor,
    queries: Sequence[int],
    totals: Sequence[int],
    block_table: torch.Tensor,
    pages: torch.Tensor,
    kv_b: torch.Tensor,
) -> torch.Tensor:
    rank = kv_b.shape[-1]
    nope = q.shape[-1] - (pages.shape[-1] - rank)
    absorbed = batched_linear(q[..., :nope].transpose(0, 1), kv_b[:, :nope].mT).transpose(0, 1)
    query = torch.cat([absorbed, q[..., nope:]], -1)
    parts = []
    for part, count, length, table in zip(query.split(list(queries)), queries, totals, block_table, strict=True):
        if not length:
            parts.append(part.new_zeros(count, part.shape[1], rank))
            continue
        rows = cached_rows(pages, table, length).float()
        sees = torch.arange(length - count + 1, length + 1, device=q.device)
        parts.append(_mixture(part, rows, sees, rank, q.shape[-1] ** -0.5).to(q.dtype))
    mixed = torch.cat(parts).transpose(0, 1)
    return batched_linear(mixed, kv_b[:, nope:]).transpose(0, 1).flatten(1)


def _mixture(q: torch.Tensor, rows: torch.Tensor, sees: torch.Tensor, rank: int, scale: float) -> torch.Tensor:
    """softmax(scale q rows^T) rows[:, :rank] for q [n, H, R], query i seeing the first sees[i] rows: [n, H, rank]."""
    step = max(1, PRODUCTS // (q.shape[1] * BLOCK * q.shape[2]))
    return torch.cat(
        [
            _running_softmax(part, rows, seen, rank, scale)
            for part, seen in zip(q.split(step), sees.split(step), strict=True)
        ]
    )


def _running_softmax(q: torch.Tensor, rows: torch.Tensor, sees: torch.Tensor, rank: int, scale: float) -> torch.Tensor:
    n, heads, _ = q.shape
    q32 = q.float().unsqueeze(2)
    top = q32.new_full((n, heads, 1), -torch.inf)
    norm, acc = torch.zeros_like(top), q32.new_zeros(n, heads, rank)
    for first in range(0, rows.shape[0], BLOCK):
        block = rows[first : first + BLOCK]
        if block.shape[0] < BLOCK:  # the tree must not depend on how many rows there are so far
            block = torch.nn.functional.pad(block, (0, 0, 0, BLOCK - block.shape[0]))
        seen = torch.arange(first, first + BLOCK, device=q.device) < sees[:, None]
        scores = fold_sum(q32 * block) * scale
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        p, keep = torch.exp(scores - new_top), torch.exp(top - new_top)
        norm = norm * keep + fold_sum(p).unsqueeze(-1)
        # the fold runs over the last dimension: rows stand there
        acc = acc * keep + fold_sum(p.unsqueeze(2) * block[:, :rank].T)
        top = new_top
    return acc / norm
