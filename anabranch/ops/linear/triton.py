"""The batch-invariant matrix product: K in four fixed segments (one where 256 does not divide it), summed as
(s0 + s1) + (s2 + s3), for every shape. Bits depend on a row of x, a row of w and K alone, and equal those of
ops/skinny_gemm.

The product is formed transposed, 64 or more rows of w against a tile of tokens. A bf16 tile of any token count then
runs on the same instruction family (wgmma, 16 columns of K a step, in ascending order), and neither the tile sizes nor
the zeros of a masked tail change the order of addition of an element. See spec.py for shapes.
"""

import torch
import triton
import triton.language as tl

SEGMENTS, BLOCK = 4, 64  # as ops/skinny_gemm sums


@triton.jit
def weight_tile(w, row, start, columns, stride, K: tl.constexpr, EVEN: tl.constexpr):
    """Columns `start .. start + K` of the given rows of a [N, columns] matrix: [rows, K]."""
    k = start + tl.arange(0, K)
    at = w + row.to(tl.int64)[:, None] * stride + k[None, :]
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=k[None, :] < columns, other=0.0)


@triton.jit
def token_tile(x, token, inside, start, columns, stride, K: tl.constexpr, EVEN: tl.constexpr):
    """Columns `start .. start + K` of the given rows of x, transposed: [K, tokens], zero outside."""
    k = start + tl.arange(0, K)
    at = x + token.to(tl.int64)[None, :] * stride + k[:, None]
    if EVEN:
        return tl.load(at, mask=inside[None, :], other=0.0)
    else:
        return tl.load(at, mask=inside[None, :] & (k[:, None] < columns), other=0.0)


@triton.jit(do_not_specialize=["tokens"])
def _linear(
    x,
    w,
    y,
    tokens,
    rows,
    columns,
    x_group,
    x_stride,
    w_group,
    w_stride,
    T: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    EVEN: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    group = tl.program_id(2).to(tl.int64)
    token, row = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1) * R + tl.arange(0, R)
    inside, known = token < tokens, tl.minimum(row, rows - 1)
    front, back = tl.zeros((R, T), tl.float32), tl.zeros((R, T), tl.float32)
    for segment in range(SEGMENTS):
        total = tl.zeros((R, T), tl.float32)
        for start in range(segment * (columns // SEGMENTS), (segment + 1) * (columns // SEGMENTS), K):
            a = weight_tile(w + group * w_group, known, start, columns, w_stride, K, EVEN)
            b = token_tile(x + group * x_group, token, inside, start, columns, x_stride, K, EVEN)
            total = tl.dot(a, b, total, input_precision="ieee")
        if SEGMENTS == 1 or segment < SEGMENTS // 2:
            front += total
        else:
            back += total
    total = front + back
    at = y + (group * tokens + token.to(tl.int64))[None, :] * rows + row[:, None]
    tl.store(at, total.to(y.dtype.element_ty), mask=inside[None, :] & (row < rows)[:, None])


def segments(columns: int) -> int:
    """The fixed parts that K is summed in: a function of K alone."""
    return SEGMENTS if columns % (SEGMENTS * BLOCK) == 0 else 1


def gemm_tile(tokens: int, dtype: torch.dtype) -> dict[str, int]:
    """Launch constants for this many tokens. They set the speed and never the bits."""
    if dtype == torch.float32:
        return {"T": 16, "R": 64, "K": 32, "num_warps": 4, "num_stages": 2}
    if tokens <= 64:
        return {"T": max(16, triton.next_power_of_2(tokens)), "R": 64, "K": 128, "num_warps": 4, "num_stages": 4}
    return {"T": 128, "R": 128, "K": 64, "num_warps": 8, "num_stages": 4}


def batched_linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """y[g] = x[g] w[g]^T: [G, T, K] and [G, N, K] -> [G, T, N], inner strides one, others free."""
    groups, tokens, columns = x.shape
    rows = w.shape[1]
    y = torch.empty((groups, tokens, rows), dtype=x.dtype, device=x.device)
    if y.numel():
        tile = gemm_tile(tokens, x.dtype)
        grid = (triton.cdiv(tokens, tile["T"]), triton.cdiv(rows, tile["R"]), groups)
        strides = (x.stride(0), x.stride(1), w.stride(0), w.stride(1))
        parts = segments(columns)
        if columns // parts % tile["K"]:
            tile["K"] = min(tile["K"], BLOCK)
        even = columns % tile["K"] == 0
        _linear[grid](x, w, y, tokens, rows, columns, *strides, **tile, EVEN=even, SEGMENTS=parts)
    return y


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """y = x w^T: [T, K] and [N, K] -> [T, N], inner strides one, row strides free."""
    return batched_linear(x.unsqueeze(0), w.unsqueeze(0)).squeeze(0)
