"""The block-FP8 product in Triton's interpreter: declared class at odd shapes, exact scales, unread neighbours."""

import pytest
import torch

from anabranch.ops.fp8_linear import expanded, reference
from anabranch.ops.fp8_linear.reference import CODES, quantize
from anabranch.ops.fp8_linear.spec import FP8_LINEAR
from anabranch.ops.fp8_linear.tile import parse
from anabranch.ops.fp8_linear.triton import expand, fp8_linear
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


@pytest.mark.parametrize("columns", [128, 200, 640, 1664])
@pytest.mark.parametrize("tokens", [1, 17, 70])
def test_no_tile_changes_a_bit(tokens, columns):
    """Sums that are exact in any order, so what differs was read twice, or not at all, or scaled by another block."""
    codes = torch.randint(-8, 9, (300, columns)).float().to(CODES)
    scale = torch.exp2(torch.randint(-3, 3, (3, -(-columns // 128))).float())
    x = torch.randint(-8, 9, (tokens, columns)).to(torch.bfloat16)
    want = (x.double() @ reference.dequantize(codes, scale).double().T).to(torch.bfloat16)
    for name in ("T16R64K128W4S5P", "T32R128K64W8S4P", "T64R64K32W4S2", "T128R128K128W8S3"):
        BITWISE.check(fp8_linear(x, codes, scale, parse(name)), want, name)


def test_parts_are_added_in_order():
    """2^26 + 0 - 2^26 + 1: added in pairs or from the back it would be 0."""
    codes, x = torch.zeros(64, 512), torch.zeros(1, 512)
    codes[:, 0], codes[:, 256], codes[:, 384] = 256, -256, 1
    x[:, 0], x[:, 256], x[:, 384] = 2.0**18, 2.0**18, 1
    for name in ("T16R64K32W4S2P", "T16R64K32W4S2"):
        BITWISE.check(fp8_linear(x, codes.to(CODES), torch.ones(1, 4), parse(name)), torch.ones(1, 64), name)


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (300, 200), (40, 64), (257, 129)])
def test_expanding_is_dequantising_and_one_rounding(rows, columns):
    codes, scale = quantize(torch.randn(rows, columns) * torch.linspace(0.1, 9, rows)[:, None])
    held = torch.full((scale.shape[0], scale.shape[1] + 3), torch.nan)
    held[:, : scale.shape[1]] = scale
    want = reference.dequantize(codes, scale)
    for dtype in (torch.bfloat16, torch.float32):
        BITWISE.check(expand(codes, held[:, : scale.shape[1]], dtype), want.to(dtype))


def test_many_tokens_go_through_the_library_in_pieces(monkeypatch):
    codes, scale = quantize(torch.randn(300, 200) / 14)
    x, made = strided(9, 200, torch.bfloat16), []
    want = reference.fp8_linear(x, codes, scale)
    few = expanded.fp8_linear(x, codes, scale)
    monkeypatch.setattr(expanded, "FROM", 9)
    monkeypatch.setattr(expanded.triton, "expand", lambda codes, *rest: made.append(len(codes)) or expand(codes, *rest))
    for scratch, pieces in ((1 << 20, [300]), (200 * 2 * 256, [256, 44]), (1, [128, 128, 44])):
        monkeypatch.setattr(expanded, "SCRATCH", scratch)
        made.clear()
        for tokens in (8, 9):  # eight are few: they expand nothing
            FP8_LINEAR.equality.check(expanded.fp8_linear(x[:tokens], codes, scale), want[:tokens])
        assert made == pieces
    BITWISE.check(few, fp8_linear(x, codes, scale))
