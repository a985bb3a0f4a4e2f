"""Sorts (token, choice) pairs by expert and cuts each expert's run into tiles, on the device, without a host sync.

The order of pairs inside a run is whatever the atomics give; each pair's result is computed on its own, so no bit of
the output depends on it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from anabranch.ops.early import early_launch, follow

_ONE_PROGRAM = 4096  # up to here one launch does everything


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """`pairs` int32 [P] is sorted by expert; tile i holds `pairs[first[i]:stop[i]]` of `expert[i]`, or expert -1.

    `expert`, `first` and `stop` are the rows of one int32 [3, slots] table. Other ranks' pairs are in no tile.
    """

    pairs: torch.Tensor
    table: torch.Tensor

    @property
    def slots(self) -> int:
        return self.table.shape[1]


@triton.jit
def _rank(experts, cursor, ranks, pairs, first, count, chunk, CHUNK: tl.constexpr):
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(experts + i, mask=i < pairs, other=-1) - first
    local = (i < pairs) & (expert >= 0) & (expert < count)
    tl.store(ranks + i, tl.atomic_add(cursor + expert, 1, mask=local, sem="relaxed"), mask=local)


@triton.jit
def _plan(cursor, offsets, table, count, slots, EXPERTS: tl.constexpr, TILE: tl.constexpr, TAIL: tl.constexpr):
    e = tl.arange(0, EXPERTS)
    # the counts were written by atomics, past the first-level cache
    size = tl.load(cursor + e, mask=e < count, other=0, cache_modifier=".cg")
    stop = tl.cumsum(size, 0)
    first = stop - size
    tl.store(offsets + e, first, mask=e < count)
    tiles = tl.where(size > 0, tl.maximum((size - TAIL + TILE - 1) // TILE, 1), 0)
    at = tl.cumsum(tiles, 0) - tiles
    for j in range(0, tl.max(tiles, 0)):
        begin, has = first + j * TILE, j < tiles
        tl.store(table + at + j, e, mask=has)
        tl.store(table + slots + at + j, begin, mask=has)
        tl.store(table + 2 * slots + at + j, tl.where(j + 1 < tiles, begin + TILE, stop), mask=has)
    used = tl.sum(tiles, 0)
    for start in range(0, slots, EXPERTS):
        slot = start + e
        tl.store(table + slot, tl.full((EXPERTS,), -1, tl.int32), mask=(slot >= used) & (slot < slots))


@triton.jit
def _place(experts, ranks, offsets, sorted_pairs, pairs, first, count, chunk, CHUNK: tl.constexpr):
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(experts + i, mask=i < pairs, other=-1) - first
    local = (i < pairs) & (expert >= 0) & (expert < count)
    at = tl.load(offsets + expert, mask=local, other=0, cache_modifier=".cg")
    at += tl.load(ranks + i, mask=local, other=0, cache_modifier=".cg")
    tl.store(sorted_pairs + at, i, mask=local)


@triton.jit(do_not_specialize=["pairs", "first", "slots"])
def _align(
    experts,
    cursor,
    offsets,
    ranks,
    sorted_pairs,
    table,
    pairs,
    first,
    count,
    slots,
    EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
    TAIL: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):
    follow(EARLY)
    e = tl.arange(0, EXPERTS)
    tl.store(cursor + e, tl.zeros((EXPERTS,), tl.int32), mask=e < count)
    tl.debug_barrier()
    _rank(experts, cursor, ranks, pairs, first, count, 0, CHUNK)
    tl.debug_barrier()
    _plan(cursor, offsets, table, count, slots, EXPERTS, TILE, TAIL)
    tl.debug_barrier()
    _place(experts, ranks, offsets, sorted_pairs, pairs, first, count, 0, CHUNK)


@triton.jit(do_not_specialize=["pairs", "first"])
def _rank_chunks(experts, cursor, ranks, pairs, first, count, CHUNK: tl.constexpr, EARLY: tl.constexpr):
    follow(EARLY)
    _rank(experts, cursor, ranks, pairs, first, count, tl.program_id(0), CHUNK)


@triton.jit(do_not_specialize=["slots"])
def _plan_once(
    cursor,
    offsets,
    table,
    count,
    slots,
    EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
    TAIL: tl.constexpr,
    EARLY: tl.constexpr,
):
    follow(EARLY)
    _plan(cursor, offsets, table, count, slots, EXPERTS, TILE, TAIL)


@triton.jit(do_not_specialize=["pairs", "first"])
def _place_chunks(experts, ranks, offsets, sorted_pairs, pairs, first, count, CHUNK: tl.constexpr, EARLY: tl.constexpr):
    follow(EARLY)
    _place(experts, ranks, offsets, sorted_pairs, pairs, first, count, tl.program_id(0), CHUNK)


def slots(pairs: int, count: int, tile: int) -> int:
    """The most tiles that any choice gives: each non-empty run adds at most one that is not full."""
    return min(pairs, count) + pairs // tile


def align(experts: torch.Tensor, first: int, count: int, tile: int, tail: int = 0) -> Tiles:
    """Tiles of at most `tile` pairs, the last of a run `tail` more, over the local experts `first .. first + count`.

    Args:
        experts: int64 [T, k], dense, global indices.
    """
    pairs, device = experts.numel(), experts.device
    result = Tiles(
        pairs=torch.empty(pairs, dtype=torch.int32, device=device),
        table=torch.empty((3, slots(pairs, count, tile)), dtype=torch.int32, device=device),
    )
    ranks = torch.empty(pairs, dtype=torch.int32, device=device)
    blocks = {"EXPERTS": triton.next_power_of_2(count), "TILE": tile, "TAIL": tail}
    if pairs <= _ONE_PROGRAM:
        cursor, offsets = torch.empty((2, count), dtype=torch.int32, device=device)
        chunk = max(128, triton.next_power_of_2(pairs))
        scratch = (experts, cursor, offsets, ranks, result.pairs, result.table)
        _align[(1,)](*scratch, pairs, first, count, result.slots, **blocks, CHUNK=chunk, num_warps=8, **early_launch())
        return result
    cursor, offsets = torch.zeros((2, count), dtype=torch.int32, device=device)
    chunks = (triton.cdiv(pairs, 1024),)
    _rank_chunks[chunks](experts, cursor, ranks, pairs, first, count, CHUNK=1024, **early_launch())
    _plan_once[(1,)](cursor, offsets, result.table, count, result.slots, **blocks, num_warps=8, **early_launch())
    _place_chunks[chunks](experts, ranks, offsets, result.pairs, pairs, first, count, CHUNK=1024, **early_launch())
    return result
