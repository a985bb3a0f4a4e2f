"""Latent attention on the GPU: absorbed form, split over fixed stretches of the sequence, merged in a fixed order.

A query's bits depend on its own rows alone: where a split ends, the tile sizes and the order of the merge know neither
the batch nor the other requests. Prefill treats every query token as a decode query with the rows that it may see.
Shape legend: latent [row, rank], shared [row, rope], acc [head, rank]; all heads of a request read the same rows.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
import torch
import triton
import triton.language as tl

from anabranch.ops.norm.triton import fixed_layout
from anabranch.ops.segments import Segments

PROGRAMS = 132  # one for each multiprocessor of an H200: more splits than that are walked, not launched
STAGES = 5  # page numbers two pages ahead, rows in two buffers
WRITE_WARPS = 2
PARTIAL_BYTES = 256 << 20  # bounds what a long prompt's splits hold at once


def mla_write(kv: torch.Tensor, weight: torch.Tensor, eps: float, rows: torch.Tensor, pages: torch.Tensor) -> None:
    """See spec.py: one launch, one program a token, so that a row's bits are its own."""
    kv = fixed_layout(kv)
    if len(kv):
        rank, width = weight.shape[0], kv.shape[1]
        sizes = (kv.stride(0), rows.stride(0), pages.stride(0), eps)
        _write[(len(kv),)](
            *(kv, weight, rows, pages, *sizes),
            RANK=rank,
            ROPE=width - rank,
            PAGE=pages.shape[1],
            num_warps=WRITE_WARPS,
        )


def mla_decode(
    q: torch.Tensor,
    totals: torch.Tensor,
    block_table: torch.Tensor,
    pages: torch.Tensor,
    kv_b: torch.Tensor,
) -> torch.Tensor:
    """See spec.py. Rank, rope and page size are powers of two from 16 up.

    Holds B * ceil(max pages / pages a split) * H * (rank + 2) fp32: pass a block table no wider than needed.
    """
    rank = kv_b.shape[-1]
    nope = q.shape[-1] - (pages.shape[-1] - rank)
    absorbed = head_gemm(q[..., :nope], kv_b[:, :nope])
    mixed = _mixture(absorbed, q, totals, block_table, pages, nope)
    return head_gemm(mixed, kv_b[:, nope:].mT).flatten(1)


def mla_prefill(
    q: torch.Tensor,
    segments: Segments,
    block_table: torch.Tensor,
    pages: torch.Tensor,
    kv_b: torch.Tensor,
) -> torch.Tensor:
    """See spec.py; equal to as many decode steps, bit for bit."""
    tokens, heads, _ = q.shape
    width = triton.cdiv(max(segments.totals), pages.shape[1])
    index = torch.arange(tokens, device=q.device)
    owner = torch.repeat_interleave(index[: len(segments)], segments.offsets.diff(), output_size=tokens)
    sees = (segments.ends - segments.offsets[1:])[owner] + index + 1
    partial = triton.cdiv(width, _split_pages(heads)) * heads * (kv_b.shape[-1] + 2) * 4
    step = max(1, PARTIAL_BYTES // partial)
    parts = zip(q.split(step), sees.split(step), owner.split(step), strict=True)
    return torch.cat([mla_decode(part, rows, block_table[own, :width], pages, kv_b) for part, rows, own in parts])


def head_gemm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, H, K] times each head's weight [K, N] of [H, K, N], any strides: [T, H, N]; bits of a token are its own."""
    tokens, heads, depth = x.shape
    columns = weight.shape[2]
    y = torch.empty(tokens, heads, columns, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(columns, 64), heads, triton.cdiv(tokens, 64))
    _head_gemm[grid](
        *(x, weight, y, tokens, *x.stride(), *weight.stride()),
        K=depth,
        N=columns,
        ROWS=64,
        COLUMNS=64,
        DEPTH=64,
        num_warps=4,
        num_stages=4,
    )
    return y


def _split_pages(heads: int) -> int:
    """Pages a split: more heads mean a larger partial result, to be paid by more rows."""
    return 4 if heads <= 16 else 8


def _mixture(
    absorbed: torch.Tensor,
    q: torch.Tensor,
    totals: torch.Tensor,
    block_table: torch.Tensor,
    pages: torch.Tensor,
    nope: int,
) -> torch.Tensor:
    """softmax(scale [absorbed | q[nope:]] rows^T) latent, for one query a request: [B, H, rank]."""
    requests, heads, rank = absorbed.shape
    page, width = pages.shape[1:]
    split_pages, block = _split_pages(heads), 16 if heads <= 16 else 32
    splits, blocks = triton.cdiv(block_table.shape[1], split_pages), triton.cdiv(heads, block)
    acc = torch.empty(requests, splits, heads, rank, dtype=torch.float32, device=q.device)
    stats = torch.empty(requests, splits, heads, 2, dtype=torch.float32, device=q.device)
    walkers = min(splits, triton.cdiv(PROGRAMS, requests * blocks))
    _attend_splits[(walkers, blocks, requests)](
        *(absorbed, q, pages, block_table, totals, acc, stats),
        *(q.stride(0), q.stride(1), *block_table.stride(), totals.stride(0), pages.stride(0), splits),
        q.shape[-1] ** -0.5 * 1.4426950408889634,  # softmax in powers of two
        H=heads,
        NOPE=nope,
        RANK=rank,
        ROPE=width - rank,
        PAGE=page,
        SPLIT_PAGES=split_pages,
        HEADS=block,
        num_warps=8,
        num_stages=STAGES if q.dtype.itemsize == 2 else 1,  # fp32 rows fill shared memory
    )
    mixed = torch.empty(requests, heads, rank, dtype=q.dtype, device=q.device)
    columns = min(rank, 256)
    _merge_splits[(rank // columns, heads, requests)](
        *(acc, stats, totals, mixed, totals.stride(0), splits),
        H=heads,
        RANK=rank,
        SPLIT=split_pages * page,
        SPLITS=32,
        COLUMNS=columns,
        num_warps=4,
    )
    return mixed


@triton.jit
def write_row(kv, weight, rows, pages, page_pitch, eps, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr):
    """The normed latent and the raw shared key of one token to the cache row named at `rows`, unless that is negative.

    `weight` is the norm's, loaded. Nothing is read behind the branch: all loads are under way at once.
    """
    r, e = tl.arange(0, RANK), tl.arange(0, ROPE)
    row, latent, shared = tl.load(rows), tl.load(kv + r), tl.load(kv + RANK + e)
    if row >= 0:
        to = pages + (row // PAGE) * page_pitch + (row % PAGE) * (RANK + ROPE)
        latent32 = latent.to(tl.float32)
        normed = latent32 * tl.rsqrt(tl.sum(latent32 * latent32, 0) / RANK + eps)
        w = weight.to(latent.dtype).to(tl.float32)
        tl.store(to + r, (normed.to(latent.dtype).to(tl.float32) * w).to(latent.dtype))
        tl.store(to + RANK + e, shared)


@triton.jit(do_not_specialize=["row_stride"], do_not_specialize_on_alignment=["rows"])
def _write(
    kv, weight, rows, pages, kv_stride, row_stride, page_pitch, eps,
    RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    w = tl.load(weight + tl.arange(0, RANK))
    write_row(kv + token * kv_stride, w, rows + token * row_stride, pages, page_pitch, eps, RANK, ROPE, PAGE)


@triton.jit(do_not_specialize=["T"])
def _head_gemm(
    x, w, y, T, x_token, x_head, x_depth, w_head, w_depth, w_column,
    K: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1)
    t = tl.program_id(2).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n, k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    x_ptr = x + h * x_head + t[:, None] * x_token + k[None, :] * x_depth
    w_ptr = w + h * w_head + k[:, None] * w_depth + n[None, :] * w_column
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, K, DEPTH):
        deep = first + k < K
        a = tl.load(x_ptr + first * x_depth, (t < T)[:, None] & deep[None, :], other=0.0)
        b = tl.load(w_ptr + first * w_depth, deep[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    inside = (t < T)[:, None] & (n < N)[None, :]
    heads = tl.num_programs(1)
    tl.store(y + (t[:, None] * heads + h) * N + n[None, :], acc.to(y.dtype.element_ty), inside)


@triton.jit
def attend_tiles(
    latent_q, shared_q, pages, table, entry_stride, page_pitch, total, first, last, scale,
    RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Tiles first .. last of ROWS cache rows against all heads: mixture [head, RANK], largest score, sum of weights."""
    r, e, n = tl.arange(0, RANK), tl.arange(0, ROPE), tl.arange(0, ROWS)
    top = tl.full([latent_q.shape[0]], float("-inf"), tl.float32)
    norm = tl.zeros([latent_q.shape[0]], tl.float32)
    mix = tl.zeros([latent_q.shape[0], RANK], tl.float32)
    for j in range(first, last):
        page = tl.load(table + (j * ROWS // PAGE) * entry_stride)
        rows = pages + page * page_pitch + (j * ROWS % PAGE + n)[:, None] * (RANK + ROPE)
        seen = j * ROWS + n < total
        # rows not yet written may hold anything: zero times NaN is NaN
        latent = tl.load(rows + r[None, :], seen[:, None], other=0.0)
        shared = tl.load(rows + RANK + e[None, :], seen[:, None], other=0.0)
        score = tl.dot(latent_q, latent.T, input_precision="ieee")
        score = tl.dot(shared_q, shared.T, score, input_precision="ieee") * scale
        score = tl.where(seen[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        p, keep = tl.exp2(score - new_top[:, None]), tl.exp2(top - new_top)
        norm = norm * keep + tl.sum(p, 1)
        mix = tl.dot(p.to(latent.dtype), latent, mix * keep[:, None], input_precision="ieee")
        top = new_top
    return mix, top, norm


@triton.jit(
    do_not_specialize=["table_stride", "total_stride", "splits"],
    do_not_specialize_on_alignment=["table", "totals"],
)
def _attend_splits(
    absorbed,
    q,
    pages,
    table,
    totals,
    acc,
    stats,
    q_token,
    q_head,
    table_stride,
    entry_stride,
    total_stride,
    page_pitch,
    splits,
    scale,
    H: tl.constexpr,
    NOPE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT_PAGES: tl.constexpr,
    HEADS: tl.constexpr,
):
    b = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    r, e = tl.arange(0, RANK), tl.arange(0, ROPE)
    real = h < H
    total = tl.load(totals + b * total_stride)
    used = tl.cdiv(total, PAGE)
    latent_q = tl.load(absorbed + (b * H + h[:, None]) * RANK + r[None, :], real[:, None], other=0.0)
    shared_q = tl.load(q + b * q_token + h[:, None] * q_head + NOPE + e[None, :], real[:, None], other=0.0)
    for split in range(tl.program_id(0), tl.cdiv(used, SPLIT_PAGES), tl.num_programs(0)):
        mix, top, norm = attend_tiles(
            latent_q, shared_q, pages, table + b * table_stride, entry_stride, page_pitch, total,
            split * SPLIT_PAGES, tl.minimum(used, (split + 1) * SPLIT_PAGES), scale, RANK, ROPE, PAGE, PAGE,
        )  # fmt: skip
        at = (b * splits + split) * H + h
        tl.store(acc + at[:, None] * RANK + r[None, :], mix, real[:, None])
        tl.store(stats + at * 2, top, real)
        tl.store(stats + at * 2 + 1, norm, real)


@triton.jit(do_not_specialize=["total_stride", "splits"], do_not_specialize_on_alignment=["totals"])
def _merge_splits(
    acc, stats, totals, mixed, total_stride, splits,
    H: tl.constexpr, RANK: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    c, s = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, SPLITS)
    used = tl.cdiv(tl.load(totals + b * total_stride), SPLIT)
    stats_ptr = stats + (b * splits * H + h) * 2
    top = tl.full([SPLITS], float("-inf"), tl.float32)
    for first in range(0, used, SPLITS):
        top = tl.maximum(top, tl.load(stats_ptr + (first + s) * (2 * H), first + s < used, other=float("-inf")))
    best = tl.max(top, 0)
    norm = tl.zeros([SPLITS], tl.float32)
    mix = tl.zeros([COLUMNS], tl.float32)
    # absent splits of a group add exact zeros, so the sum does not know how many there are
    for first in range(0, used, SPLITS):
        some = first + s < used
        weight = tl.exp2(tl.load(stats_ptr + (first + s) * (2 * H), some, other=float("-inf")) - best)
        norm += weight * tl.load(stats_ptr + (first + s) * (2 * H) + 1, some, other=0.0)
        at = (b * splits + first + s) * H + h
        part = tl.load(acc + at[:, None] * RANK + c[None, :], some[:, None], other=0.0)
        mix += tl.sum(part * weight[:, None], 0)
    mix = mix / tl.where(used > 0, tl.sum(norm, 0), 1.0)
    tl.store(mixed + (b * H + h) * RANK + c, mix.to(mixed.dtype.element_ty))
