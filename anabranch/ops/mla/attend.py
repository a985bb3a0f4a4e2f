"""Two launches of balanced.py in CUDA C++ for Hopper (csrc/): bf16, rank 512, rope 64, pages of 64 rows.

They write and read the same pieces as the Triton kernels, which serve every other shape.
"""

from functools import cache

import torch

from anabranch.ops import native

RANK, ROPE, PAGE = 512, 64, 64


@cache
def available() -> bool:
    """Whether this GPU is a Hopper, and the kernels are built or can be."""
    return torch.cuda.get_device_capability() == (9, 0) and native.verdict("mla").ok


def fits(q: torch.Tensor, pages: torch.Tensor, kv_b: torch.Tensor) -> bool:
    """Whether these are of the shape and layout that the kernels read: rows on 16 bytes."""
    shapes = kv_b.shape[2] == RANK and tuple(pages.shape[1:]) == (PAGE, RANK + ROPE) and (q.shape[2] - ROPE) % 8 == 0
    all_bf16 = all(t.dtype == torch.bfloat16 for t in (q, pages, kv_b))
    aligned = all(t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0 and t.stride(-1) == 1 for t in (q, pages, kv_b))
    dense = q.stride(1) % 8 == 0 and pages.stride(1) == RANK + ROPE and kv_b.stride(1) == RANK
    return all_bf16 and shapes and aligned and dense


def attend(
    absorbed: torch.Tensor,
    q: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    totals: torch.Tensor,
    acc: torch.Tensor,
    stats: torch.Tensor,
    programs: int,
    least: int,
    chained: bool,
    early: bool,
) -> None:
    """absorbed [B, H, 512] and q's last 64 columns against the cache, into acc [programs + B, H, 512] and stats.

    Args:
        programs, least: how pages are shared out, see balanced.py.
        chained: may start while the kernel before still runs, and waits for it.
        early: reads lengths, table and all cache rows but the newest before it waits.
    """
    scale = q.shape[-1] ** -0.5 * 1.4426950408889634  # softmax in powers of two
    places = (absorbed, q, pages, block_table, totals, acc, stats)
    native.load("mla").attend(*places, programs, least, scale, chained, chained and early)


def leave(
    acc: torch.Tensor,
    stats: torch.Tensor,
    totals: torch.Tensor,
    weight: torch.Tensor | None,
    gate: torch.Tensor | None,
    programs: int,
    least: int,
    chained: bool,
    early: bool,
) -> torch.Tensor:
    """Merged mixtures of `attend`'s pieces times each head's value weights [H, v, 512], gated: [B, H, v].

    Without weights the mixtures themselves: [B, H, 512] in bf16, not gated.

    Args:
        gate: logits [B, H * v], read before the wait: they need a launch that is not chained.
        programs, least: as of `attend`, which made the pieces.
        chained, early: likewise; only the lengths are read early.
    """
    assert gate is None or not chained
    width = RANK if weight is None else weight.shape[1]
    y = torch.empty(len(totals), acc.shape[1], width, dtype=torch.bfloat16, device=acc.device)
    native.load("mla").leave(acc, stats, totals, weight, gate, y, programs, least, chained, chained and early)
    return y
