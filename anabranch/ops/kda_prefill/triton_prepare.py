"""First kernel of the chunked prefill: all that is not serial, one program a (chunk, head). See chunked.py for shapes.

Inside a chunk every decay between two tokens is formed as exp of a sum of gates that lie between them, never as a
quotient, so no exponent is above 0 for any gate. The sums are products with 0/1 matrices. Pairs (i, j) are met at
dyadic levels: at half length Z, blocks of 2Z tokens, i in the right half and j in the left, both scaled to the last
token of the left half. The same levels invert I + A: T_21 = -T_22 A_21 T_11, each block rounded to bf16 before a later
one uses it, which keeps the error of T to its own last rounding. Tiles are [token, channel] and [token, token].
"""

import triton
import triton.language as tl

CHUNK: tl.constexpr = tl.constexpr(64)
LEVELS: tl.constexpr = tl.constexpr(6)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LEAST: tl.constexpr = tl.constexpr(-160.0)  # exp2 of it is 0 in fp32, and sums of 64 such gates fit fp16 operands
GIVEN: tl.constexpr = tl.constexpr(0)  # the three kinds of gate
SOFTPLUS: tl.constexpr = tl.constexpr(1)
BOUNDED: tl.constexpr = tl.constexpr(2)
ABREAST: tl.constexpr = tl.constexpr(32)  # segments looked at together


@triton.jit
def chunks_before(offsets, segment, count):
    """Chunks of the segments in front of `segment`."""
    before = tl.cast(0, tl.int64)
    for first in range(0, count, ABREAST):
        i = first + tl.arange(0, ABREAST)
        there = i < segment
        tokens = tl.load(offsets + i + 1, there, other=0) - tl.load(offsets + i, there, other=0)
        before += tl.sum((tokens + CHUNK - 1) // CHUNK, 0)
    return before


@triton.jit
def _tokens_of(chunk, offsets, count):
    """First token of a chunk and the end of its segment."""
    segment, skipped, seen = tl.cast(0, tl.int64), tl.cast(0, tl.int64), tl.cast(0, tl.int64)
    for first in range(0, count, ABREAST):
        i = first + tl.arange(0, ABREAST)
        there = i < count
        tokens = tl.load(offsets + i + 1, there, other=0) - tl.load(offsets + i, there, other=0)
        chunks = (tokens + CHUNK - 1) // CHUNK
        before = there & (seen + tl.cumsum(chunks, 0) <= chunk)
        segment += tl.sum(before.to(tl.int64), 0)
        skipped += tl.sum(tl.where(before, chunks, 0), 0)
        seen += tl.sum(chunks, 0)
    return tl.load(offsets + segment) + (chunk - skipped) * CHUNK, tl.load(offsets + segment + 1)


@triton.jit
def _sigmoid(x):
    """By exp2 and rsqrt, which flush denormals and so are one instruction each; exp and a quotient are a dozen."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2_E))
    return root * root


@triton.jit
def _gates(pointers, dt_bias, a_log, bound, total, live, GATE: tl.constexpr):
    """fp16 log2 decays of tokens and half the channels; stores the decay over the chunk."""
    x = tl.load(pointers, live[:, None], other=0.0).to(tl.float32)
    if GATE == GIVEN:
        x = x * LOG2_E
    else:
        zeta = x + tl.load(dt_bias)[None, :]
        rate = tl.exp(tl.load(a_log))
        if GATE == SOFTPLUS:
            zeta = zeta * LOG2_E
            x = -rate * tl.where(zeta > 28.0, zeta, tl.log2(1.0 + tl.exp2(zeta)))
        else:
            x = bound * LOG2_E * _sigmoid(rate * zeta)
    x = tl.where(live[:, None], tl.where(x < LEAST, LEAST, x), 0.0)
    tl.store(total, tl.exp2(tl.sum(x, 0)))
    return x.to(tl.float16)


@triton.jit
def _outer(tile, q, k, x, sums, q_norm, k_norm, D: tl.constexpr):
    """Kd, Qd and Kg of half the channels."""
    decay = tl.exp2(tl.dot(_matrix(sums, LEVELS), x))
    tl.store(tile, _scaled(k, decay * k_norm[:, None]))
    tl.store(tile + CHUNK * D, _scaled(q, decay * q_norm[:, None]))
    decay = tl.exp2(tl.dot(_matrix(sums, LEVELS + 1), x))
    tl.store(tile + 2 * CHUNK * D, _scaled(k, decay * k_norm[:, None]))


@triton.jit
def _within(j, low, length):
    """[row, column]: low <= column < low + length, with one comparison."""
    return (j[None, :] - low[:, None]).to(tl.uint32, bitcast=True) < length[:, None].to(tl.uint32, bitcast=True)


@triton.jit
def _matrix(sums, which):
    """Matrix `which` of `sums`."""
    i = tl.arange(0, CHUNK)
    return tl.load(sums + which * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :])


@triton.jit
def _scaled(rows, decay):
    """bf16 operand of bf16 rows and fp32 decays."""
    return (rows.to(tl.float32) * decay).to(tl.bfloat16)


@triton.jit
def _rows(pointers, live):
    """bf16 rows of q or k over half the channels and their sums of squares."""
    rows = tl.load(pointers, live[:, None], other=0.0).to(tl.bfloat16)
    return rows, tl.sum(rows.to(tl.float32) * rows.to(tl.float32), 1)


@triton.jit
def _level(T, R, q0, q1, k0, k1, x0, x1, sums, row, column, i, level):
    """T and R after the pairs at half length Z = 2^level."""
    Z = 1 << level
    gates = _matrix(sums, level)
    near = tl.exp2(tl.dot(gates, x0))
    k_near = tl.trans(_scaled(k0, near))
    A = tl.dot(_scaled(k0, near), k_near)
    C = tl.dot(_scaled(q0, near), k_near)
    near = tl.exp2(tl.dot(gates, x1))
    k_near = tl.trans(_scaled(k1, near))
    A = tl.dot(_scaled(k1, near), k_near, A)
    C = tl.dot(_scaled(q1, near), k_near, C)
    met = _within(i, i & ~(2 * Z - 1), i & Z)
    A = tl.where(met, A, 0.0) * row[:, None] * column[None, :]
    R = tl.where(met, C, R)
    correction = tl.dot(T, tl.dot(A.to(tl.bfloat16), T).to(tl.bfloat16))
    return (T.to(tl.float32) - correction).to(tl.bfloat16), R


# what varies with the batch is not specialised on: a chunk's bits are its own
@triton.jit(
    do_not_specialize=["count", "b_stride"],
    do_not_specialize_on_alignment=["offsets", "b", "a_log"],
)
def prepare(
    q,
    k,
    f,
    b,
    dt_bias,
    a_log,
    sums,
    offsets,
    tiles,
    scales,
    count,
    q_stride,
    k_stride,
    f_stride,
    b_stride,
    bound,
    D: tl.constexpr,
    GATE: tl.constexpr,
    NORM: tl.constexpr,
):
    h, H, chunk = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    first, end = _tokens_of(chunk, offsets, count)
    HALF: tl.constexpr = D // 2
    i, c = tl.arange(0, CHUNK), tl.arange(0, HALF)
    t = first + i
    live = t < end
    place = chunk * H + h
    scale, wide = scales + place * (D + CHUNK), tiles + place * (3 * CHUNK * D + 2 * CHUNK * CHUNK)
    f_at = f + (t * f_stride)[:, None] + (h * D + c)[None, :]
    x0 = _gates(f_at, dt_bias + h * D + c, a_log + h, bound, scale + c, live, GATE)
    x1 = _gates(f_at + HALF, dt_bias + h * D + HALF + c, a_log + h, bound, scale + HALF + c, live, GATE)
    beta = tl.load(b + t * b_stride + h, live, other=0.0).to(tl.float32)
    if NORM:
        beta = tl.where(live, _sigmoid(beta), 0.0)
    tl.store(scale + D + i, beta)
    k_at, q_at = (t * k_stride)[:, None] + (h * D + c)[None, :], (t * q_stride)[:, None] + (h * D + c)[None, :]
    k0, k0_squares = _rows(k + k_at, live)
    k1, k1_squares = _rows(k + HALF + k_at, live)
    q0, q0_squares = _rows(q + q_at, live)
    q1, q1_squares = _rows(q + HALF + q_at, live)
    k_norm, q_norm = tl.full([CHUNK], 1.0, tl.float32), tl.full([CHUNK], 1.0, tl.float32)
    if NORM:
        k_norm = tl.rsqrt(k0_squares + k1_squares + 1e-6)
        q_norm = tl.rsqrt(q0_squares + q1_squares + 1e-6)
    q_norm = q_norm * (1.0 / tl.sqrt(D * 1.0))
    at = wide + i[:, None] * D + c[None, :]
    _outer(at, q0, k0, x0, sums, q_norm, k_norm, D)
    _outer(at + HALF, q1, k1, x1, sums, q_norm, k_norm, D)
    eye = i[:, None] == i[None, :]
    T = tl.where(eye, 1.0, 0.0).to(tl.bfloat16)
    own = tl.sum(q0.to(tl.float32) * k0.to(tl.float32), 1) + tl.sum(q1.to(tl.float32) * k1.to(tl.float32), 1)
    R = tl.where(eye, own[:, None], 0.0)
    for level in range(LEVELS):
        T, R = _level(T, R, q0, q1, k0, k1, x0, x1, sums, k_norm * beta, k_norm, i, level)
    square = wide + 3 * CHUNK * D + i[:, None] * CHUNK + i[None, :]
    tl.store(square, T)
    tl.store(square + CHUNK * CHUNK, (R * q_norm[:, None] * k_norm[None, :]).to(tl.bfloat16))
