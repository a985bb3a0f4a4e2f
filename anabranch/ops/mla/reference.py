"""Latent attention in plain PyTorch. See spec.py for shapes."""

from collections.abc import Callable

import torch

from anabranch.ops.arithmetic import row_sum
from anabranch.ops.gate.reference import sigmoid_gate
from anabranch.ops.norm.reference import rms_norm
from anabranch.ops.segments import Segments

QUERY_BLOCK = 256  # bounds the score matrix of a long prompt


def cached_rows(pages: torch.Tensor, block_table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` cache rows of one sequence, in order: [length, R]."""
    page = pages.shape[1]
    used = block_table[: -(-length // page)]
    return pages.index_select(0, used).flatten(0, 1)[:length]


def mla_write(
    kv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rows: torch.Tensor,
    pages: torch.Tensor,
    total: Callable[[torch.Tensor], torch.Tensor] = row_sum,
) -> None:
    """A fixed number of writes: tokens without a row land in the last page, which nobody reads."""
    latent, shared = kv.split([weight.shape[0], kv.shape[1] - weight.shape[0]], -1)
    new = torch.cat([rms_norm(latent, weight, eps, total), shared], -1)
    flat = pages.view(-1, pages.shape[-1])
    flat.index_copy_(0, rows.remainder(flat.shape[0]), new.to(pages.dtype))  # -1 is the last row


def mla_prefill(
    q: torch.Tensor,
    segments: Segments,
    block_table: torch.Tensor,
    pages: torch.Tensor,
    kv_b: torch.Tensor,
) -> torch.Tensor:
    """Keys and values are expanded from the latent rows of the whole sequence, old and new."""
    rank = kv_b.shape[-1]
    value_dim = q.shape[-1] - (pages.shape[-1] - rank)
    outputs = []
    for query, length, table in zip(q.split(list(segments.lengths)), segments.totals, block_table, strict=True):
        rows = cached_rows(pages, table, length)
        expanded = torch.einsum("mr,hdr->hmd", rows[:, :rank], kv_b)
        shared = rows[:, rank:].expand(kv_b.shape[0], -1, -1)
        keys = torch.cat([expanded[..., :value_dim], shared], -1)
        outputs.append(_causal(query.transpose(0, 1), keys, expanded[..., value_dim:]))
    return torch.cat(outputs)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [H, n, d] are the last n of m positions; k [H, m, d], v [H, m, e] -> [n, H * e]."""
    count, total = q.shape[1], k.shape[1]
    positions = torch.arange(total, device=q.device)
    blocks = []
    for first in range(0, count, QUERY_BLOCK):
        block = q[:, first : first + QUERY_BLOCK]
        last = total - count + first + block.shape[1]  # no key beyond the block's newest position is needed
        scores = (block @ k[:, :last].mT).float() * q.shape[-1] ** -0.5
        asking = positions[total - count + first : last]
        scores = scores.masked_fill(positions[:last] > asking[:, None], -torch.inf)
        blocks.append(torch.softmax(scores, -1).to(v.dtype) @ v[:, :last])
    return torch.cat(blocks, 1).transpose(0, 1).flatten(1)


def mla_decode(
    q: torch.Tensor,
    totals: torch.Tensor,
    block_table: torch.Tensor,
    pages: torch.Tensor,
    kv_b: torch.Tensor,
) -> torch.Tensor:
    """The key projection is absorbed into q and the value projection follows the mixture of latent rows."""
    rank = kv_b.shape[-1]
    nope = q.shape[-1] - (pages.shape[-1] - rank)
    absorbed = torch.bmm(q[..., :nope].transpose(0, 1), kv_b[:, :nope]).transpose(0, 1)
    query = torch.cat([absorbed, q[..., nope:]], -1)
    mixed = []
    for one, length, table in zip(query, totals.tolist(), block_table, strict=True):
        rows = cached_rows(pages, table, length)  # none: zeros
        p = torch.softmax((one @ rows.mT).float() * q.shape[-1] ** -0.5, -1).type_as(q)
        mixed.append(p @ rows[:, :rank])
    return torch.bmm(torch.stack(mixed, 1), kv_b[:, nope:].mT).transpose(0, 1).flatten(1)


def mla_step(
    q: torch.Tensor,
    kv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rows: torch.Tensor,
    totals: torch.Tensor,
    block_table: torch.Tensor,
    pages: torch.Tensor,
    kv_b: torch.Tensor,
    gate: Callable[[], torch.Tensor] | None = None,
    *,
    early: bool = False,
) -> torch.Tensor:
    """The chain that the step stands for; `early` changes nothing here."""
    mla_write(kv, weight, eps, rows, pages)
    o = mla_decode(q, totals, block_table, pages, kv_b)
    return o if gate is None else sigmoid_gate(o, gate())
