"""The kernels of balanced.py.

The piece of request b that program p did lies at index p + b: along the line of tiles each piece has a larger p or a
larger b than the one before. Shape legend: mix [head, RANK], acc [piece, H, RANK], stats [piece, H, 2]: largest score
and sum of weights.
"""

import triton
import triton.language as tl

from anabranch.ops.early import ahead, behind, prefetch_l2
from anabranch.ops.gate.triton import sigmoid32
from anabranch.ops.mla.triton import write_row


@triton.jit(
    do_not_specialize=["T", "row_stride"],
    do_not_specialize_on_alignment=["rows"],
)
def mla_enter(
    q, kv, weight, rows, pages, kv_b, absorbed, T,
    q_token, q_head, kv_stride, row_stride, page_pitch, w_head, w_row, eps,
    H: tl.constexpr, NOPE: tl.constexpr, DEPTH: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    PAGE: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    ahead(EARLY)
    if tl.program_id(0) < T:
        scale = tl.load(weight + tl.arange(0, RANK))
        behind(EARLY)
        token = tl.program_id(0).to(tl.int64)
        write_row(kv + token * kv_stride, scale, rows + token * row_stride, pages, page_pitch, eps, RANK, ROPE, PAGE)
    else:
        index = tl.program_id(0) - T
        h = index // (RANK // COLUMNS) % H
        t = index // (RANK // COLUMNS * H) * TOKENS + tl.arange(0, TOKENS)
        c, k = index % (RANK // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
        w = tl.load(kv_b + h.to(tl.int64) * w_head + k[:, None] * w_row + c[None, :], (k < NOPE)[:, None], other=0.0)
        behind(EARLY)
        x_ptr = q + t.to(tl.int64)[:, None] * q_token + h * q_head + k[None, :]
        x = tl.load(x_ptr, (t < T)[:, None] & (k < NOPE)[None, :], other=0.0)
        y = tl.dot(x, w, input_precision="ieee").to(absorbed.dtype.element_ty)
        tl.store(absorbed + (t.to(tl.int64) * H + h)[:, None] * RANK + c[None, :], y, (t < T)[:, None])


@triton.jit
def _line(totals, total_stride, B, ROWS: tl.constexpr, REQUESTS: tl.constexpr):
    """Request numbers and how many tiles each has: [REQUESTS]."""
    b = tl.arange(0, REQUESTS)
    return b, tl.cdiv(tl.load(totals + b * total_stride, b < B, other=0).to(tl.int32), ROWS)


@triton.jit
def _share(tiles, programs, LEAST: tl.constexpr):
    """How many tiles a program takes: shares below LEAST are doubled, up to that, for fewer pieces to merge."""
    return tl.maximum(tl.maximum(tl.cdiv(tiles, programs), 1), tl.minimum(tl.cdiv(2 * tiles, programs), LEAST))


@triton.jit
def attend_upright(
    latent_q, shared_q, pages, table, entry_stride, page_pitch, total, first, last, scale,
    RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`attend_tiles` of triton.py on q [RANK, head], its mixture likewise: cache rows are tall in both products.

    From 64 rows a tile they then run on wgmma, and no unit multiplies the empty half of a tile of 32 heads.
    """
    r, e, n = tl.arange(0, RANK), tl.arange(0, ROPE), tl.arange(0, ROWS)
    top = tl.full([latent_q.shape[1]], float("-inf"), tl.float32)
    norm = tl.zeros([latent_q.shape[1]], tl.float32)
    mix = tl.zeros([RANK, latent_q.shape[1]], tl.float32)
    for j in range(first, last):
        page = tl.load(table + (j * ROWS // PAGE) * entry_stride)
        rows = pages + page * page_pitch + (j * ROWS % PAGE + n)[:, None] * (RANK + ROPE)
        seen = j * ROWS + n < total
        # rows not yet written may hold anything: zero times NaN is NaN
        latent = tl.load(rows + r[None, :], seen[:, None], other=0.0)
        shared = tl.load(rows + RANK + e[None, :], seen[:, None], other=0.0)
        score = tl.dot(latent, latent_q, input_precision="ieee")
        score = tl.dot(shared, shared_q, score, input_precision="ieee") * scale
        score = tl.where(seen[:, None], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 0))
        p, keep = tl.exp2(score - new_top[None, :]), tl.exp2(top - new_top)
        norm = norm * keep + tl.sum(p, 0)
        mix = tl.dot(latent.T, p.to(latent.dtype), mix * keep[None, :], input_precision="ieee")
        top = new_top
    return mix, top, norm


@triton.jit(
    do_not_specialize=["table_stride", "total_stride", "B"],
    do_not_specialize_on_alignment=["table", "totals"],
)
def mla_attend(
    absorbed, q, pages, table, totals, acc, stats,
    q_token, q_head, table_stride, entry_stride, total_stride, page_pitch, B, scale,
    H: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, REQUESTS: tl.constexpr, LEAST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    ahead(EARLY)
    behind(EARLY)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    r, e = tl.arange(0, RANK), tl.arange(0, ROPE)
    real = h < H
    requests, tiles = _line(totals, total_stride, B, ROWS, REQUESTS)
    ends = tl.cumsum(tiles, 0)
    line = tl.sum(tiles, 0)
    share = _share(line, tl.num_programs(0), LEAST)
    at = tl.program_id(0) * share
    stop = tl.minimum(line, at + share)
    while at < stop:
        b = tl.sum((ends <= at).to(tl.int32), 0)
        end = tl.sum(tl.where(requests == b, ends, 0), 0)
        begin = end - tl.sum(tl.where(requests == b, tiles, 0), 0)
        until = tl.minimum(stop, end)
        wide = b.to(tl.int64)
        total, row = tl.load(totals + wide * total_stride), table + wide * table_stride
        latent_q, shared_q = absorbed + (wide * H + h) * RANK, q + wide * q_token + h * q_head + NOPE
        piece = (wide + tl.program_id(0)) * H + h
        left = tl.load(latent_q[None, :] + r[:, None], real[None, :], other=0.0)
        right = tl.load(shared_q[None, :] + e[:, None], real[None, :], other=0.0)
        mix, top, norm = attend_upright(
            left, right, pages, row, entry_stride, page_pitch, total, at - begin, until - begin, scale,
            RANK, ROPE, PAGE, ROWS,
        )  # fmt: skip
        tl.store(acc + piece[None, :] * RANK + r[:, None], mix, real[None, :])
        tl.store(stats + piece * 2, top, real)
        tl.store(stats + piece * 2 + 1, norm, real)
        at = until


@triton.jit(
    do_not_specialize=["B", "total_stride", "programs"],
    do_not_specialize_on_alignment=["totals"],
)
def mla_leave(
    acc, stats, totals, kv_b, gate, y, B, total_stride, programs, w_head, w_row, gate_stride,
    NOPE: tl.constexpr, V: tl.constexpr, RANK: tl.constexpr, SLICE: tl.constexpr, ROWS: tl.constexpr,
    REQUESTS: tl.constexpr, LEAST: tl.constexpr, PIECES: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    ahead(EARLY)
    h, t = tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    r, s = tl.arange(0, SLICE), tl.arange(0, PIECES)
    if COLUMNS == 0:
        r += tl.program_id(0) * SLICE
    else:
        c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        w_ptr = kv_b + h.to(tl.int64) * w_head + (NOPE + c)[:, None] * w_row + r[None, :]
        w = tl.load(w_ptr, (c < V)[:, None], other=0.0)
    behind(EARLY)
    requests, tiles = _line(totals, total_stride, B, ROWS, REQUESTS)
    share = _share(tl.sum(tiles, 0), programs, LEAST)
    begin = tl.sum(tl.where(requests < t, tiles, 0), 0)
    own = tl.sum(tl.where(requests == t, tiles, 0), 0)
    first = begin // share
    count = tl.where(own > 0, (begin + own - 1) // share - first + 1, 0)
    top = float("-inf")
    norm = 0.0
    mix = tl.zeros([SLICE], tl.float32)
    for base in range(0, count, PIECES):
        some = base + s < count
        piece = (first + t + base + s).to(tl.int64) * heads + h
        best = tl.load(stats + piece * 2, some, other=float("-inf"))
        sums = tl.load(stats + piece * 2 + 1, some, other=0.0)
        part = tl.load(acc + piece[:, None] * RANK + r[None, :], some[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(best, 0))
        keep, raised = tl.exp2(top - new_top), tl.exp2(best - new_top)
        norm = norm * keep + tl.sum(raised * sums, 0)
        mix = mix * keep + tl.sum(part * raised[:, None], 0)
        top = new_top
    mixed = (mix / tl.where(count > 0, norm, 1.0)).to(y.dtype.element_ty)
    at = t.to(tl.int64) * heads + h
    if COLUMNS:
        out = tl.sum(w.to(tl.float32) * mixed.to(tl.float32)[None, :], 1).to(w.dtype)
        if GATED:
            out = _gated(out, gate + t.to(tl.int64) * gate_stride + h * V + c, c < V)
        tl.store(y + at * V + c, out, c < V)
    else:
        tl.store(y + at * RANK + r, mixed)


@triton.jit
def _gated(value, gate, inside):
    """value * sigmoid(gate), rounded as ops/gate rounds."""
    strength = sigmoid32(tl.load(gate, inside, other=0.0).to(tl.float32)).to(value.dtype)
    return (value.to(tl.float32) * strength.to(tl.float32)).to(value.dtype)


@triton.jit(do_not_specialize=["T"])
def mla_value(
    mixed, weight, gate, y, T, w_head, w_row, gate_stride,
    V: tl.constexpr, RANK: tl.constexpr, DEPTH: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    GATED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    ahead(EARLY)
    h, heads = tl.program_id(1), tl.num_programs(1)
    t = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    c, k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    at = t.to(tl.int64)[:, None] * heads + h
    total = tl.zeros([TOKENS, COLUMNS], tl.float32)
    if EARLY:  # the weights on their way from memory while the kernel before still works
        fetched = weight + h.to(tl.int64) * w_head + tl.minimum(c, V - 1) * w_row
        prefetch_l2(fetched, RANK * weight.dtype.element_ty.primitive_bitwidth // 8)
    behind(EARLY)
    for start in range(0, RANK, DEPTH):
        x = tl.load(mixed + at * RANK + start + k[None, :], (t < T)[:, None], other=0.0)
        w_ptr = weight + h.to(tl.int64) * w_head + c[None, :] * w_row + start + k[:, None]
        w = tl.load(w_ptr, (c < V)[None, :], other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    inside = (t < T)[:, None] & (c < V)[None, :]
    out = total.to(y.dtype.element_ty)
    if GATED:
        out = _gated(out, gate + t.to(tl.int64)[:, None] * gate_stride + h * V + c[None, :], inside)
    tl.store(y + at * V + c[None, :], out, inside)
