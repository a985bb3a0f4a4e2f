"""The block-FP8 product in Triton's interpreter: declared class at odd shapes, exact scales, unread neighbours."""

import pytest
import torch

from anabranch.ops.fp8_linear import reference
from anabranch.ops.fp8_linear.reference import CODES, quantize
from anabranch.ops.fp8_linear.spec import FP8_LINEAR
from anabranch.ops.fp8_linear.triton import fp8_linear
from anabranch.ops.spec import BITWISE


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def strided(tokens: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.full((tokens, columns + 20), torch.nan, dtype=dtype)
    wide[:, 7 : 7 + columns] = torch.randn(tokens, columns)
    return wide[:, 7 : 7 + columns]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (300, 200), (40, 64), (144, 384), (257, 129)])
@pytest.mark.parametrize("tokens", [0, 1, 7, 17, 65])
def test_declared_class(dtype, rows, columns, tokens):
    codes, scale = quantize(torch.randn(rows, columns) / columns**0.5 * torch.linspace(0.1, 9, rows)[:, None])
    x = strided(tokens, columns, dtype)
    FP8_LINEAR.equality.check(fp8_linear(x, codes, scale), reference.fp8_linear(x, codes, scale))


def test_every_code_and_every_block_exactly():
    """One-hot activations read single weights: all finite codes, with scales that are powers of two."""
    every = torch.arange(256).repeat(128, 1).to(torch.uint8)
    every[(every & 127) == 127] = 0
    codes = torch.cat([every, every.flip(0).roll(3, 1)]).view(CODES).contiguous()
    scale = torch.tensor([[1.0, 0.25], [2.0**-9, 64.0]])
    x = torch.eye(256)
    want = reference.dequantize(codes, scale).T + 0.0  # a sum that starts from zero has no -0
    BITWISE.check(fp8_linear(x, codes, scale), want.contiguous())


@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 65, 130])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(tokens):
    """Integers and powers of two are exact in any order, so the interpreter's own matrix product cannot hide a tile."""
    codes = torch.randint(-8, 9, (200, 384)).float().to(CODES)
    scale = torch.exp2(torch.randint(-3, 3, (2, 3)).float())
    x = torch.randint(-8, 9, (tokens, 384)).to(torch.bfloat16)
    whole = fp8_linear(x, codes, scale)
    BITWISE.check(whole, (x.float() @ reference.dequantize(codes, scale).T).to(torch.bfloat16))
    BITWISE.check(fp8_linear(x[-1:], codes, scale), whole[-1:])


def test_neighbours_and_pad_columns_of_scale_are_never_read():
    codes, scale = quantize(torch.randn(256, 200))
    held = torch.full((4, 5), torch.nan)
    held[1:3, :2] = scale
    x = torch.randn(3, 200)
    BITWISE.check(fp8_linear(x, codes, held[1:3, :2]), fp8_linear(x, codes, scale))
