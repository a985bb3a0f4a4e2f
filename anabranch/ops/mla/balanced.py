"""A whole decode step of latent attention in few launches, its work dealt out evenly. See spec.py for shapes.

`mla_enter` multiplies q by the key weights and writes the new cache rows. `mla_attend` lines up the cache tiles of all
requests and gives every program an equal share of the line, so that one short request fills the device and a long one
does not hold up a batch; it is CUDA C++ (attend.py) where that is built for the shape, else Triton. `mla_leave` merges
the pieces of each request and, for few requests, multiplies by the value weights and gates in the same launch; else
`mla_value` does. Sums depend on the shares, and so on the batch: deterministic mode has triton.py.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton

from anabranch.ops.early import early_launch
from anabranch.ops.mla import attend as cuda
from anabranch.ops.mla import triton_balanced as kernels
from anabranch.ops.norm.triton import fixed_layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Launch constants.

    Of attend: `programs` that share the line of tiles, of which half idle while shares are below `least` tiles; `rows`
    a tile and `heads` a program. Of leave: `pieces` at once, value `columns` of a head a program, or 0 where
    `mla_value` follows and a program merges a `slice` of the latent; and `leave_warps` a program. With `cuda` both are
    of attend.py, where a tile is a page and only `programs`, `least` and whether there are `columns` matter.
    """

    programs: int = 132
    least: int = 1
    rows: int = 64
    heads: int = 32
    cuda: bool = False
    pieces: int = 8
    columns: int = 0
    slice: int = 256
    leave_warps: int = 4


def choose_tiles(requests: int, heads: int, page: int, cuda: bool = False) -> Tiles:
    """Launch constants for this many requests and heads."""
    chosen: dict[str, int] = {"slice": 128} if requests <= 16 else {}
    if requests <= 4:
        chosen = {"pieces": 32, "columns": 32, "leave_warps": 8}
    chosen |= {"rows": min(page, 64), "heads": 16 if heads <= 16 else 32}
    if cuda and requests <= 4:
        chosen["least"] = 4  # the leave that multiplies reads each piece four times
    return Tiles(cuda=cuda, **chosen)


def plan(q: torch.Tensor, pages: torch.Tensor, kv_b: torch.Tensor) -> Tiles:
    """Launch constants for these queries, pages and weights, of the CUDA kernels where they can be had."""
    native = q.is_cuda and cuda.fits(q, pages, kv_b) and cuda.available()
    return choose_tiles(len(q), q.shape[1], pages.shape[1], native)


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
    tiles: Tiles | None = None,
    *,
    early: bool = False,
) -> torch.Tensor:
    """See spec.py. Rank, rope and page size are powers of two from 16 up.

    Raises:
        ValueError: `tiles` ask for CUDA kernels that were not made for these tensors.
    """
    tiles = tiles or plan(q, pages, kv_b)
    if tiles.cuda and not cuda.fits(q, pages, kv_b):
        raise ValueError(
            f"mla_step: q {tuple(q.shape)}, pages {tuple(pages.shape)}, {q.dtype}: not of the CUDA kernels"
        )
    absorbed = _launch_enter(q, kv, weight, eps, rows, pages, kv_b)
    pieces = _launch_attend(absorbed, q, totals, block_table, pages, tiles, early)
    return _launch_leave(*pieces, totals, kv_b, q.shape[-1] - (pages.shape[-1] - weight.shape[0]), gate, tiles, early)


def _launch_enter(
    q: torch.Tensor,
    kv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rows: torch.Tensor,
    pages: torch.Tensor,
    kv_b: torch.Tensor,
) -> torch.Tensor:
    """q [B, H, nope] times each head's key weights: [B, H, rank]; and the cache rows of `kv`."""
    (requests, heads, _), rank, kv = q.shape, weight.shape[0], fixed_layout(kv)
    rope = kv.shape[1] - rank
    nope, columns, tokens = q.shape[2] - rope, min(64, rank), 16 if requests <= 16 else 64
    absorbed = torch.empty(requests, heads, rank, dtype=q.dtype, device=q.device)
    products = triton.cdiv(requests, tokens) * heads * (rank // columns)
    kernels.mla_enter[(requests + products,)](
        *(q, kv, weight, rows, pages, kv_b, absorbed, requests, q.stride(0), q.stride(1), kv.stride(0)),
        *(rows.stride(0), pages.stride(0), kv_b.stride(0), kv_b.stride(1), eps),
        H=heads,
        NOPE=nope,
        DEPTH=triton.next_power_of_2(nope),
        RANK=rank,
        ROPE=rope,
        PAGE=pages.shape[1],
        TOKENS=tokens,
        COLUMNS=columns,
        **early_launch(),
        num_warps=4,
    )
    return absorbed


def _launch_attend(
    absorbed: torch.Tensor,
    q: torch.Tensor,
    totals: torch.Tensor,
    block_table: torch.Tensor,
    pages: torch.Tensor,
    tiles: Tiles,
    early: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unnormed mixtures [pieces, H, rank] and, for each, largest score and sum of weights [pieces, H, 2]."""
    requests, heads, rank = absorbed.shape
    page, width = pages.shape[1:]
    acc = torch.empty(tiles.programs + requests, heads, rank, dtype=torch.float32, device=q.device)
    stats = torch.empty(tiles.programs + requests, heads, 2, dtype=torch.float32, device=q.device)
    if tiles.cuda:
        chained = early_launch().get("launch_pdl", False)
        places = (absorbed, q, pages, block_table, totals, acc, stats)
        cuda.attend(*places, tiles.programs, tiles.least, chained, early)
        return acc, stats
    kernels.mla_attend[(tiles.programs, triton.cdiv(heads, tiles.heads))](
        *(absorbed, q, pages, block_table, totals, acc, stats),
        *(q.stride(0), q.stride(1), *block_table.stride(), totals.stride(0), pages.stride(0), requests),
        q.shape[-1] ** -0.5 * 1.4426950408889634,  # softmax in powers of two
        H=heads,
        NOPE=q.shape[2] - (width - rank),
        RANK=rank,
        ROPE=width - rank,
        PAGE=page,
        ROWS=tiles.rows,
        HEADS=tiles.heads,
        REQUESTS=_capacity(requests),
        LEAST=tiles.least,
        **early_launch(),
        num_warps=4,
        num_stages=3,
    )
    return acc, stats


def _launch_leave(
    acc: torch.Tensor,
    stats: torch.Tensor,
    totals: torch.Tensor,
    kv_b: torch.Tensor,
    nope: int,
    gate: Callable[[], torch.Tensor] | None,
    tiles: Tiles,
    early: bool = False,
) -> torch.Tensor:
    """Merged mixtures times each head's value weights, gated: [B, H * v]."""
    requests, (heads, rows, rank) = len(totals), kv_b.shape
    width, fused, value = rows - nope, tiles.columns > 0, kv_b[:, nope:]
    logits = gate() if fused and gate is not None else None
    if tiles.cuda:
        # a gate may come from another stream, and is read before the wait
        chained = early_launch(logits is None).get("launch_pdl", False)
        shares = (tiles.programs, tiles.least, chained, early)
        y = cuda.leave(acc, stats, totals, value if fused else None, logits, *shares)
        return y.flatten(1) if fused else _launch_value(y, value, gate)
    y = torch.empty(requests, heads, width if fused else rank, dtype=kv_b.dtype, device=kv_b.device)
    part = rank if fused else min(rank, tiles.slice)
    kernels.mla_leave[(triton.cdiv(width, tiles.columns) if fused else rank // part, heads, requests)](
        *(acc, stats, totals, kv_b, y if logits is None else logits, y),
        *(requests, totals.stride(0), tiles.programs, *kv_b.stride()[:2], 0 if logits is None else logits.stride(0)),
        NOPE=nope,
        V=width,
        RANK=rank,
        SLICE=part,
        ROWS=tiles.rows,
        REQUESTS=_capacity(requests),
        LEAST=tiles.least,
        PIECES=tiles.pieces,
        COLUMNS=tiles.columns,
        GATED=logits is not None,
        **early_launch(logits is None),
        num_warps=tiles.leave_warps,
    )
    return y.flatten(1) if fused else _launch_value(y, value, gate)


def _launch_value(mixed: torch.Tensor, weight: torch.Tensor, gate: Callable[[], torch.Tensor] | None) -> torch.Tensor:
    """mixed [B, H, rank] times weight [H, v, rank], gated: [B, H * v]."""
    (requests, heads, rank), width = mixed.shape, weight.shape[1]
    tokens, logits = 16 if requests <= 16 else 64, None if gate is None else gate()
    y = torch.empty(requests, heads * width, dtype=mixed.dtype, device=mixed.device)
    kernels.mla_value[(triton.cdiv(width, 32), heads, triton.cdiv(requests, tokens))](
        *(mixed, weight, y if logits is None else logits, y),
        *(requests, *weight.stride()[:2], 0 if logits is None else logits.stride(0)),
        V=width,
        RANK=rank,
        DEPTH=min(rank, 128),
        TOKENS=tokens,
        COLUMNS=32,
        GATED=logits is not None,
        **early_launch(logits is None),
        num_warps=4,
        num_stages=4,
    )
    return y


def _capacity(requests: int) -> int:
    """Requests that a binary can count: few sizes, so few binaries."""
    return max(128, 1 << (requests - 1).bit_length())
