"""MXFP4 codes inside other kernels: exact tiles. See spec.py for the format."""

import triton
import triton.language as tl


@triton.jit
def _magnitudes(codes):
    """fp32 values of E2M1 codes 0..15 in int32: exponent and mantissa bits move to their fp32 places."""
    size = codes & 7
    # 2^(e-1) * 1.m for e > 0; the one subnormal is 0.5
    normal = (((size << 22) + (126 << 23)) | ((codes & 8) << 28)).to(tl.float32, bitcast=True)
    small = tl.where((codes & 8) != 0, -0.5, 0.5) * size.to(tl.float32)
    return tl.where(size < 2, small, normal)


@triton.jit
def _powers(scale):
    """fp32 2^(s-127) of scale bytes in int32: 0 is the subnormal 2^-127 and 255 is NaN."""
    bits = tl.where(scale == 0, 1 << 22, tl.where(scale == 255, 0x7FC00000, scale << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def mxfp4_tile(codes, scale, row, start, columns, K: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr):
    """Columns `start .. start + K` of the given rows of a packed [N, columns / 2] matrix: [rows, K] in bf16 or fp32."""
    R: tl.constexpr = row.shape[0]
    byte, group = start // 2 + tl.arange(0, K // 2), start // 32 + tl.arange(0, K // 32)
    at = codes + row.to(tl.int64)[:, None] * (columns // 2) + byte[None, :]
    scale_at = scale + row.to(tl.int64)[:, None] * (columns // 32) + group[None, :]
    if EVEN:
        packed, power = tl.load(at), tl.load(scale_at)
    else:
        packed = tl.load(at, mask=(byte < columns // 2)[None, :], other=0)
        power = tl.load(scale_at, mask=(group < columns // 32)[None, :], other=127)
    packed = packed.to(tl.int32)
    value = tl.reshape(tl.join(_magnitudes(packed & 15), _magnitudes(packed >> 4)), (R, K // 32, 32))
    exact = value * _powers(power.to(tl.int32))[:, :, None]
    return tl.reshape(exact, (R, K)).to(DTYPE)
