"""Prefill in the explicit form through PyTorch's fused attention, one sequence at a time. See spec.py for shapes."""

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from anabranch.ops.mla.reference import cached_rows
from anabranch.ops.segments import Segments


def mla_prefill(
    q: torch.Tensor,
    segments: Segments,
    block_table: torch.Tensor,
    pages: torch.Tensor,
    kv_b: torch.Tensor,
) -> torch.Tensor:
    """Keys and values are expanded from the latent rows of the whole sequence, old and new."""
    rank = kv_b.shape[-1]
    nope = q.shape[-1] - (pages.shape[-1] - rank)
    weight = kv_b.flatten(0, 1)
    outputs = []
    for query, length, table in zip(q.split(list(segments.lengths)), segments.totals, block_table, strict=True):
        rows = cached_rows(pages, table, length)
        expanded = F.linear(rows[:, :rank], weight).unflatten(1, kv_b.shape[:2])
        shared = rows[:, None, rank:].expand(-1, kv_b.shape[0], -1)
        keys = torch.cat([expanded[..., :nope], shared], -1)
        outputs.append(_causal(query, keys, expanded[..., nope:]))
    return torch.cat(outputs)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [n, H, d] are the last n of m positions; k [m, H, d], v [m, H, e] -> [n, H * e]."""
    count, length, width = q.shape[0], k.shape[0], v.shape[2]
    # the flash backend takes one head size only; without it a GPU would build the n x m score matrix
    v = F.pad(v, (0, k.shape[2] - width))
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    if count == length:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    elif count == 1:
        o = F.scaled_dot_product_attention(q, k, v)
    else:
        o = F.scaled_dot_product_attention(q, k, v, causal_lower_right(count, length))
    return o[0, ..., :width].transpose(0, 1).flatten(1)
