"""Packing in one Triton launch: programs share out the tiles of all strided tensors. See spec.py.

A tensor is seen as rows of an innermost dimension; tiles are [row, column] with 2048 elements, moved as integers.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from anabranch.ops.pack import reference
from anabranch.ops.pack.spec import counts, strided

TILE, WARPS, MOST = 2048, 8, 8  # elements, and tensors a launch
MOST_TILES = 2**31 - 1
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def pack(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Each tensor dense; one that is dense already is returned itself. What cannot be packed is copied, and counted."""
    views = {i: _rows(tensors[i]) for i in strided(tensors)}
    home = next((tensors[i].device for i in views), None)
    refused = {i: why for i, view in views.items() if (why := _refusal(tensors[i], view, home))}
    todo = [i for i in views if i not in refused][:MOST]
    for why in refused.values():
        counts[f"refused: {why}"] += 1
    if len(todo) < 2 or sum(_tiles(views[i]) for i in todo) > MOST_TILES:
        return reference.pack(tensors)
    out = list(tensors)
    for i in todo:
        out[i] = torch.empty(tensors[i].shape, dtype=tensors[i].dtype, device=home)
    _launch([tensors[i] for i in todo], [out[i] for i in todo], [views[i] for i in todo])
    counts["packed"] += len(todo)
    counts["launches"] += 1
    return reference.pack(out)


def _rows(t: torch.Tensor) -> list[tuple[int, int]]:
    """(size, stride) of the fewest dimensions that walk t in order, outermost first; the middle is filled up."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(t.shape, t.stride(), strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    # the row count, which varies, comes first: the middle is specialised on
    return merged[:-1] + [(1, 0)] * (3 - len(merged)) + merged[-1:]


def _refusal(t: torch.Tensor, view: list[tuple[int, int]], home: torch.device | None) -> str | None:
    """Why this one is left to an ordinary copy, or None."""
    if torch.is_grad_enabled() and t.requires_grad:
        return "autograd"
    if t.device != home:
        return "another device"
    if t.dtype not in BITS:
        return "dtype"
    return "more than three dimensions that do not merge" if len(view) > 3 else None


def _columns(view: list[tuple[int, int]]) -> int:
    """Columns of a tile: the innermost dimension, or as much of it as a tile holds."""
    return min(TILE, triton.next_power_of_2(view[2][0]))


def _tiles(view: list[tuple[int, int]]) -> int:
    columns = _columns(view)
    return triton.cdiv(view[0][0] * view[1][0], TILE // columns) * triton.cdiv(view[2][0], columns)


def _launch(tensors: list[torch.Tensor], out: list[torch.Tensor], views: list[list[tuple[int, int]]]) -> None:
    ends, total = [], 0
    for view in views:
        total += _tiles(view)
        ends.append(total)
    fill = MOST - len(tensors)
    sources = [t.view(BITS[t.dtype]) for t in tensors]
    targets = [t.view(BITS[t.dtype]) for t in out]
    _pack[(total,)](
        tuple(sources + sources[:1] * fill),
        tuple(targets + targets[:1] * fill),
        tuple(view[1][0] for view in views + views[:1] * fill),
        tuple(view[2][0] for view in views + views[:1] * fill),
        *(tuple(view[i][1] for view in views + views[:1] * fill) for i in range(3)),
        *(ends + [total] * fill),
        *(view[0][0] * view[1][0] for view in views + views[:1] * fill),
        COUNT=len(tensors),
        COLUMNS=tuple(_columns(view) for view in views + views[:1] * fill),
        TILE=TILE,
        num_warps=WARPS,
    )


@triton.jit
def _copy(source, target, tile, rows, middle, inner, s0, s1, s2, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """One tile: element (r, c) lies at (r // middle) s0 + (r % middle) s1 + c s2."""
    ROWS: tl.constexpr = TILE // COLUMNS
    across = tl.cdiv(inner, COLUMNS)
    r = (tile // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r < rows)[:, None] & (c < inner)[None, :]
    start = (r // middle) * s0 + (r % middle) * s1
    value = tl.load(source + start[:, None] + (c.to(tl.int64) * s2)[None, :], inside)
    tl.store(target + (r * inner)[:, None] + c[None, :], value, inside)


# how many rows and tiles there are changes with the batch: no prompt may need a binary of its own
@triton.jit(do_not_specialize=[f"{name}{i}" for name in "er" for i in range(MOST)])
def _pack(
    sources, targets, middle, inner, s0, s1, s2,
    e0, e1, e2, e3, e4, e5, e6, e7,
    r0, r1, r2, r3, r4, r5, r6, r7,
    COUNT: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    ends, rows = (e0, e1, e2, e3, e4, e5, e6, e7), (r0, r1, r2, r3, r4, r5, r6, r7)
    tile = tl.program_id(0)
    start = 0
    for i in tl.static_range(COUNT):
        if (tile >= start) & (tile < ends[i]):
            _copy(
                *(sources[i], targets[i], tile - start, rows[i], middle[i], inner[i], s0[i], s1[i], s2[i]),
                COLUMNS=COLUMNS[i],
                TILE=TILE,
            )
        start = ends[i]
