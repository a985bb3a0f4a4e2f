"""Second kernel of the chunked prefill: chunk after chunk, the state in registers. See chunked.py for shapes.

One program owns ROWS value rows of one head of one segment: S [value, key] in fp32. A chunk is
X = beta (V - S Kd^T), U = X T^T, o = S Qd^T + U R^T, S <- S dec + U Kg, all [value, token]. Every left operand is made
from what the program just computed; every right operand is a tile that `triton_prepare` wrote.
"""

import triton
import triton.language as tl

from anabranch.ops.kda_prefill.triton_prepare import CHUNK, chunks_before


# what varies with the batch is not specialised on: a segment's bits are its own
@triton.jit(
    do_not_specialize=["count", "slot_stride", "save_stride"],
    do_not_specialize_on_alignment=["offsets", "slots", "saves"],
)
def chain(
    tiles,
    scales,
    v,
    out,
    offsets,
    slots,
    saves,
    state,
    count,
    v_stride,
    o_stride,
    slot_stride,
    save_stride,
    state_pitch,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    SAVE: tl.constexpr,
    STAGES: tl.constexpr,
):
    h, H, b = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    value, key, i = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, CHUNK)
    first, end = tl.load(offsets + b), tl.load(offsets + b + 1)
    slot = tl.load(slots + b * slot_stride).to(tl.int64)
    steps = (end - first + CHUNK - 1) // CHUNK
    if slot < 0:
        for n in range(0, steps):
            t = first + n * CHUNK + i
            nothing = tl.zeros([ROWS, CHUNK], out.dtype.element_ty)
            tl.store(out + (t * o_stride)[None, :] + (h * D + value)[:, None], nothing, (t < end)[None, :])
        return
    in_slot = h * (D * D) + value[:, None] * D + key[None, :]
    S = tl.load(state + slot * state_pitch + in_slot).to(tl.float32)
    before = chunks_before(offsets, b, count)
    in_tile, in_square = i[None, :] * D + key[:, None], 3 * CHUNK * D + i[None, :] * CHUNK + i[:, None]
    for n in tl.range(0, steps, num_stages=STAGES):
        place = (before + n) * H + h
        wide = tiles + place * (3 * CHUNK * D + 2 * CHUNK * CHUNK)
        Kd = tl.load(wide + in_tile)
        Qd = tl.load(wide + CHUNK * D + in_tile)
        Kg = tl.load(wide + 2 * CHUNK * D + i[:, None] * D + key[None, :])
        T = tl.load(wide + in_square)
        R = tl.load(wide + CHUNK * CHUNK + in_square)
        scale = scales + place * (D + CHUNK)
        dec, beta = tl.load(scale + key), tl.load(scale + D + i)
        t = first + n * CHUNK + i
        live, column = (t < end)[None, :], (h * D + value)[:, None]
        V = tl.load(v + (t * v_stride)[None, :] + column, live, other=0.0).to(tl.float32)
        S_bf16 = S.to(tl.bfloat16)
        X = (V - tl.dot(S_bf16, Kd)) * beta[None, :]
        o = tl.dot(S_bf16, Qd)
        U = tl.dot(X.to(tl.bfloat16), T).to(tl.bfloat16)
        S = tl.dot(U, Kg, S * dec[None, :])
        o = tl.dot(U, R, o)
        tl.store(out + (t * o_stride)[None, :] + column, o.to(out.dtype.element_ty), live)
        if SAVE:
            kept = tl.load(saves + (before + n) * save_stride)
            if kept >= 0:
                tl.store(state + kept * state_pitch + in_slot, S.to(state.dtype.element_ty))
    tl.store(state + slot * state_pitch + in_slot, S.to(state.dtype.element_ty))
