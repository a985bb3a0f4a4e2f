"""MXFP4 codes inside other kernels: exact tiles, their columns as they come or arranged. See spec.py for the format.

Arranged, a 32-bit word of eight codes becomes four registers of two bf16 that are 16 bits apart in the word, and a
thread of a wgmma finds all of a word's columns to be its own. So the columns of every 128 take the order of
`arranged_place`, and what the tile is multiplied by is kept in that order too (`arrange`).
"""

# pyright: reportCallIssue=false, reportArgumentType=false
import torch
import triton
import triton.language as tl

from anabranch.ops.early import early_launch, follow, hopper

BLOCK = 128  # columns that are arranged among themselves
# how a tile is made: not of MXFP4; its columns in their order; arranged; arranged, in PTX
PLAIN, ORDERED, ARRANGED, NATIVE = 0, 1, 2, 3


def tile_form(columns: int, dtype: torch.dtype) -> int:
    """How tiles of a packed [N, columns] matrix are made: ORDERED, ARRANGED or NATIVE, whatever their size."""
    if dtype != torch.bfloat16 or columns % BLOCK:
        return ORDERED
    return NATIVE if hopper() else ARRANGED


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


@triton.jit
def arranged_place(column):
    """Where a column stands: in a block of 16 words, nibbles 0 and 4 of every word, then 1 and 5, 2 and 6, 3 and 7."""
    return column // 128 * 128 + column % 4 * 32 + column % 128 // 8 * 2 + column % 8 // 4


@triton.jit
def _arranged_source(place):
    """The inverse of `arranged_place`."""
    return place // 128 * 128 + place % 32 // 2 * 8 + place % 2 * 4 + place % 128 // 32


@triton.jit
def _pair(words, power, N: tl.constexpr):
    """bf16 values of nibbles N and N + 4 of every word, scaled."""
    low, high = _magnitudes((words >> (4 * N)) & 15), _magnitudes((words >> (4 * N + 16)) & 15)
    return (low * power).to(tl.bfloat16), (high * power).to(tl.bfloat16)


@triton.jit
def _halves(bits):
    """The two bf16 of a register."""
    low = (bits & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return low, (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _native_power(high, low, PICK: tl.constexpr):
    """A group's scale, twice, in bf16: a byte of `high` above one of `low`."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $1, $3;", "=r,r,r,r", [high, low, PICK], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def _native_pair(words, power, MASK: tl.constexpr, FACTOR: tl.constexpr):
    """A register of two scaled bf16 from the nibbles of every word that MASK keeps.

    FACTOR brings a code's sign to bit 15 and its three other bits to 6..8, which is its value times 2^-126, also for
    the subnormal code. Two exact products, by 2^126 and by the scale, lead to the weight.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, k;
        mov.b32 k, 0x7E807E80;
        and.b32 a, $1, $3;
        mul.lo.u32 a, a, $4;
        and.b32 a, a, 0x81C081C0;
        mul.rn.bf16x2 a, a, k;
        mul.rn.bf16x2 $0, a, $2;
        }""",
        "=r,r,r,r,r",
        [words, power, MASK, FACTOR],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _scale_bytes(four):
    """High and low bytes of bf16 2^(s-127) for the four scale bytes of every uint32.

    Bits are s << 7, and one below for 0, the subnormal 2^-127, and for 255, which is NaN.
    """
    # per byte s + 1, without a carry into the next: 1 or 0 for those two
    more = ((four & 0x7F7F7F7F) + 0x01010101) ^ (four & 0x80808080)
    rest = more & 0xFEFEFEFE
    plain = ((rest & 0x7F7F7F7F) + 0x7F7F7F7F) | rest  # the upper bit of a byte: whether it is another one
    return (four >> 1) & 0x7F7F7F7F, ((four << 7) & 0x80808080) | (((plain ^ 0x80808080) >> 1) & 0x40404040)


@triton.jit
def _of_words(even, odd):
    """[R, 16]: what belongs to the four words of every group, from groups 0 and 2, and 1 and 3, [R, 2] each."""
    R: tl.constexpr = even.shape[0]
    of_groups = tl.reshape(tl.join(even, odd), (R, 4))
    return tl.reshape(tl.broadcast_to(of_groups[:, :, None], (R, 4, 4)), (R, 16))


@triton.jit
def arranged_tile(codes, scale, row, start, columns, ASM: tl.constexpr):
    """Columns `start .. start + 128`, arranged, of the given rows of a packed matrix: bf16 [rows, 128].

    The columns and `start` are multiples of 128, the addresses of 4.
    """
    R: tl.constexpr = row.shape[0]
    word, line = tl.arange(0, 16), row.to(tl.int64)
    at = codes.to(tl.pointer_type(tl.uint32)) + line[:, None] * tl.multiple_of(columns // 8, 16)
    words = tl.load(at + (tl.multiple_of(start // 8, 16) + word)[None, :])
    four = tl.load(scale.to(tl.pointer_type(tl.uint32)) + line * (columns // 128) + start // 128)
    if ASM:
        high, low = _scale_bytes(four)
        even = tl.join(_native_power(high, low, 0x4040), _native_power(high, low, 0x6262))
        odd = tl.join(_native_power(high, low, 0x5151), _native_power(high, low, 0x7373))
        power, late = _of_words(even, odd), words >> 8
        a0, a1 = _halves(_native_pair(words, power, 0x000F000F, 0x1040))
        b0, b1 = _halves(_native_pair(words, power, 0x00F000F0, 0x104))
        c0, c1 = _halves(_native_pair(late, power, 0x000F000F, 0x1040))
        d0, d1 = _halves(_native_pair(late, power, 0x00F000F0, 0x104))
    else:
        even, odd = tl.join(four & 255, (four >> 16) & 255), tl.join((four >> 8) & 255, four >> 24)
        power, whole = _powers(_of_words(even, odd).to(tl.int32)), words.to(tl.int32, bitcast=True)
        a0, a1 = _pair(whole, power, 0)
        b0, b1 = _pair(whole, power, 1)
        c0, c1 = _pair(whole, power, 2)
        d0, d1 = _pair(whole, power, 3)
    first = tl.join(tl.reshape(tl.join(a0, a1), (R, 32)), tl.reshape(tl.join(c0, c1), (R, 32)))
    second = tl.join(tl.reshape(tl.join(b0, b1), (R, 32)), tl.reshape(tl.join(d0, d1), (R, 32)))
    # [row, column of a part, c or a, second or first] -> [row, part, column]
    return tl.reshape(tl.permute(tl.join(first, second), (0, 2, 3, 1)), (R, 128))


@triton.jit
def _arrange(x, y, width, stride, N: tl.constexpr, EARLY: tl.constexpr):
    follow(EARLY)
    token, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * N + tl.arange(0, N)
    value = tl.load(x + token * stride + _arranged_source(place), mask=place < width)
    tl.store(y + token * width + place, value, mask=place < width)


def arrange(x: torch.Tensor) -> torch.Tensor:
    """A dense copy of x [T, W], W a multiple of 128 and inner stride one, with its columns arranged."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, width = x.shape
    _arrange[(tokens, triton.cdiv(width, 1024))](x, y, width, x.stride(0), N=1024, **early_launch())
    return y
