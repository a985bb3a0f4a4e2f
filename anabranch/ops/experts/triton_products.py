"""What the programs of the expert kernels are made of: whose tile it is, and products of a weight tile with tokens."""

import triton
import triton.language as tl

from anabranch.ops.linear.triton import token_tile
from anabranch.ops.mxfp4.triton import arranged_tile, mxfp4_tile


@triton.jit
def sorted_tile(table, slot, slots):
    """(local expert, first pair, how many) of the slot-th tile of the table: none behind the last tile."""
    expert, first = tl.load(table + slot).to(tl.int64), tl.load(table + slots + slot)
    return expert, first, tl.where(expert < 0, 0, tl.load(table + 2 * slots + slot) - first)


@triton.jit
def members(experts, slot, tokens, first, count, MODE: tl.constexpr, TOP_K, CHOICES: tl.constexpr, T: tl.constexpr):
    """(local expert or a negative number, place of each pair of one tile, which of T places hold one).

    A slot is a (token, choice) pair, a column is a token, and the pairs of an expert are the business of the first.
    """
    t = tl.arange(0, T)
    wanted = tl.load(experts + slot)
    expert = wanted - first
    local = (expert >= 0) & (expert < count)
    if MODE == 2:
        return tl.where(local, expert, -1), slot + t, t == 0
    else:
        choice = tl.arange(0, CHOICES)[None, :]
        pair, known = t[:, None] * TOP_K + choice, (t < tokens)[:, None] & (choice < TOP_K)
        mine = tl.load(experts + pair, mask=known, other=-1) == wanted
        leads = tl.min(tl.min(tl.where(mine, pair, 0x7FFFFFFF), 1), 0) == slot
        place = tl.max(tl.where(mine, pair, -1), 1)
        return tl.where(local & leads, expert, -1), place, place >= 0


@triton.jit
def weight_tile(
    w,
    scale,
    row,
    start,
    columns,
    K: tl.constexpr,
    FP4: tl.constexpr,
    EVEN: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Columns `start .. start + K` of the given rows of a dense [N, columns] matrix or of MXFP4 codes and scales.

    FP4: how a tile is made, see `ops/mxfp4/triton.py`.
    """
    if FP4 >= 2:
        tl.static_assert(EVEN and K == 128)
        return arranged_tile(w, scale, row, start, columns, FP4 == 3)
    elif FP4 == 1:
        return mxfp4_tile(w, scale, row, start, columns, K, EVEN, DTYPE)
    else:
        k = start + tl.arange(0, K)[None, :]
        at = w + row.to(tl.int64)[:, None] * columns + k
        if EVEN:
            return tl.load(at)
        else:
            return tl.load(at, mask=k < columns, other=0.0)


@triton.jit
def pair_product(
    w,
    scale,
    columns,
    row0,
    inner,
    x,
    token,
    inside,
    x_stride,
    begin,
    end,
    R: tl.constexpr,
    K: tl.constexpr,
    STACKED: tl.constexpr,
    FP4: tl.constexpr,
    EVEN: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """fp32 [R, T] twice: gate rows `row0 ..` and the up rows `inner` below, over columns `begin .. end`."""
    T: tl.constexpr = token.shape[0]
    if STACKED or R < 64:  # wgmma takes 64 rows
        both = tl.zeros((2 * R, T), tl.float32)
        row = stacked_rows(row0, inner, R)
        for start in range(begin, end, K):
            a = weight_tile(w, scale, row, start, columns, K, FP4, EVEN, DTYPE)
            tokens = token_tile(x, token, inside, start, columns, x_stride, K, EVEN)
            both = tl.dot(a, tokens, both, input_precision="ieee")
        return unstack(both)
    else:
        row = tl.minimum(row0 + tl.arange(0, R), inner - 1)
        gate, up = tl.zeros((R, T), tl.float32), tl.zeros((R, T), tl.float32)
        for start in range(begin, end, K):
            a = weight_tile(w, scale, row, start, columns, K, FP4, EVEN, DTYPE)
            b = weight_tile(w, scale, row + inner, start, columns, K, FP4, EVEN, DTYPE)
            tokens = token_tile(x, token, inside, start, columns, x_stride, K, EVEN)
            gate = tl.dot(a, tokens, gate, input_precision="ieee")
            up = tl.dot(b, tokens, up, input_precision="ieee")
        return gate, up


@triton.jit
def stacked_rows(row0, inner, R: tl.constexpr):
    """[2*R] rows of gate|up: eight of gate, the same eight of up, and so on, as a wgmma thread holds rows 8 apart."""
    i = tl.arange(0, 2 * R)
    return tl.minimum(row0 + i // 16 * 8 + i % 8, inner - 1) + i // 8 % 2 * inner


@triton.jit
def unstack(both):
    """The gate and the up rows, [R, T] each, of products in the order of `stacked_rows`."""
    R: tl.constexpr = both.shape[0] // 2
    T: tl.constexpr = both.shape[1]
    gate, up = tl.split(tl.permute(tl.reshape(both, (R // 8, 2, 8, T)), (0, 2, 3, 1)))
    return tl.reshape(gate, (R, T)), tl.reshape(up, (R, T))


@triton.jit
def tailed_product(
    w,
    scale,
    columns,
    row,
    x,
    token,
    inside,
    rest,
    left,
    x_stride,
    K: tl.constexpr,
    FP4: tl.constexpr,
    EVEN: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """fp32 [R, T] and [R, TAIL]: the given rows of w against rows `token` and, on the same weights, `rest` of x."""
    most = tl.zeros((row.shape[0], token.shape[0]), tl.float32)
    more = tl.zeros((row.shape[0], rest.shape[0]), tl.float32)
    for start in range(0, columns, K):
        a = weight_tile(w, scale, row, start, columns, K, FP4, EVEN, DTYPE)
        b = token_tile(x, token, inside, start, columns, x_stride, K, EVEN)
        c = token_tile(x, rest, left, start, columns, x_stride, K, EVEN)
        most = tl.dot(a, b, most, input_precision="ieee")
        more = tl.dot(a, c, more, input_precision="ieee")
    return most, more


@triton.jit
def cut(columns, segment, S: tl.constexpr):
    """Where a segment of K starts. The compiler cannot see by itself that four of them start at whole 16 bytes."""
    return tl.multiple_of(segment * (columns // S), 16) if S == 4 else segment * columns


@triton.jit
def shared_pair(
    w, columns, row0, inner, x, token, inside, x_stride, R: tl.constexpr, K: tl.constexpr, S: tl.constexpr, EVEN
):
    """The pair product of the shared expert, K in S segments as `ops/linear` sums them."""
    T: tl.constexpr = token.shape[0]
    dtype: tl.constexpr = x.dtype.element_ty
    gate, up = tl.zeros((R, T), tl.float32), tl.zeros((R, T), tl.float32)
    back_gate, back_up = tl.zeros((R, T), tl.float32), tl.zeros((R, T), tl.float32)
    for segment in range(S):
        begin, end = cut(columns, segment, S), cut(columns, segment + 1, S)
        a, b = pair_product(
            w, w, columns, row0, inner, x, token, inside, x_stride, begin, end, R, K, False, False, EVEN, dtype
        )
        if S == 1 or segment < S // 2:
            gate, up = gate + a, up + b
        else:
            back_gate, back_up = back_gate + a, back_up + b
    return gate + back_gate, up + back_up


@triton.jit
def product(
    w,
    scale,
    columns,
    row,
    x,
    place,
    inside,
    begin,
    end,
    K: tl.constexpr,
    FP4: tl.constexpr,
    EVEN: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """fp32 [R, T]: the given rows of w against rows `place` of the dense x, over columns `begin .. end`."""
    total = tl.zeros((row.shape[0], place.shape[0]), tl.float32)
    for start in range(begin, end, K):
        a = weight_tile(w, scale, row, start, columns, K, FP4, EVEN, DTYPE)
        b = token_tile(x, place, inside, start, columns, columns, K, EVEN)
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
def shared_product(w, columns, row, x, place, inside, K: tl.constexpr, S: tl.constexpr, EVEN: tl.constexpr):
    """The product of the shared expert, K in S segments as `ops/linear` sums them."""
    front = tl.zeros((row.shape[0], place.shape[0]), tl.float32)
    back = tl.zeros((row.shape[0], place.shape[0]), tl.float32)
    for segment in range(S):
        begin, end = cut(columns, segment, S), cut(columns, segment + 1, S)
        part = product(w, w, columns, row, x, place, inside, begin, end, K, False, EVEN, x.dtype.element_ty)
        if S == 1 or segment < S // 2:
            front += part
        else:
            back += part
    return front + back


@triton.jit
def matrix(w, expert, rows, columns, PACK: tl.constexpr):
    """Where expert `expert` of a stack [E, rows, columns / PACK] starts."""
    return w + expert * rows * (columns // PACK)
