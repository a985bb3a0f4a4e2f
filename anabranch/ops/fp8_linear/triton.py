"""The batch-invariant product with a block-FP8 weight: codes go to the matrix units as they are.

An E4M3 code is exact in bf16 and fp16, so 128 columns of codes times activations are summed first, in the fixed order
of ops/linear/triton.py, and their scale multiplies the sum once. No weight is rounded, and the main loop has one fused
multiply-add more than the plain product. A tile of rows never leaves its scale block. See spec.py for shapes.
"""

import torch
import triton
import triton.language as tl

from anabranch.ops.fp8_linear.reference import BLOCK
from anabranch.ops.linear.triton import gemm_tile, token_tile, weight_tile


@triton.jit(do_not_specialize=["tokens"])
def _fp8_linear(
    x,
    codes,
    scale,
    y,
    tokens,
    rows,
    columns,
    x_stride,
    scale_stride,
    T: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    B: tl.constexpr,
    EVEN: tl.constexpr,
):
    token, row = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1) * R + tl.arange(0, R)
    inside, known = token < tokens, tl.minimum(row, rows - 1)
    scales = scale + (tl.program_id(1) * R // B) * scale_stride
    total = tl.zeros((R, T), tl.float32)
    for start in range(0, columns, B):
        part = tl.zeros((R, T), tl.float32)
        for inner in tl.static_range(0, B, K):
            a = weight_tile(codes, known, start + inner, columns, columns, K, EVEN).to(x.dtype.element_ty)
            b = token_tile(x, token, inside, start + inner, columns, x_stride, K, EVEN)
            part = tl.dot(a, b, part, input_precision="ieee")
        total = tl.fma(part, tl.load(scales + start // B), total)
    at = y + token.to(tl.int64)[None, :] * rows + row[:, None]
    tl.store(at, total.to(y.dtype.element_ty), mask=inside[None, :] & (row < rows)[:, None])


def fp8_linear(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """y = x W^T: [T, K] and codes [N, K] under scale -> [T, N]; x may be a strided view."""
    tokens, columns = x.shape
    rows = codes.shape[0]
    y = torch.empty((tokens, rows), dtype=x.dtype, device=x.device)
    if y.numel():
        tile = gemm_tile(tokens, x.dtype)
        assert BLOCK % tile["K"] == BLOCK % tile["R"] == 0
        grid = (triton.cdiv(tokens, tile["T"]), triton.cdiv(rows, tile["R"]))
        strides, even = (x.stride(0), scale.stride(0)), columns % BLOCK == 0
        _fp8_linear[grid](x, codes, scale, y, tokens, rows, columns, *strides, **tile, B=BLOCK, EVEN=even)
    return y
