"""Block-FP8: the codec at odd shapes, the references against plain arithmetic, and bits that do not know the batch."""

from itertools import product

import pytest
import torch

from anabranch.ops.fp8_linear import deterministic, reference
from anabranch.ops.fp8_linear.reference import BLOCK, CODES, blocks, dequantize, quantize
from anabranch.ops.fp8_linear.spec import FP8_LINEAR, floor
from anabranch.ops.fp8_linear.tile import Tile, choose, parse

SHAPES = [(1, 1), (128, 128), (300, 200), (40, 64), (129, 384)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_value_is_a_code_times_the_scale_of_its_block(shape):
    codes, scale = quantize(torch.randn(shape) * 3)
    assert (codes.dtype, codes.shape, scale.shape) == (CODES, shape, (blocks(shape[0]), blocks(shape[1])))
    got = dequantize(codes, scale)
    for i, j in ((0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, shape[1] // 3)):
        assert got[i, j] == codes[i, j].float() * scale[i // BLOCK, j // BLOCK]


@pytest.mark.parametrize("shape", SHAPES)
def test_quantising_is_to_nearest_and_idempotent(shape):
    w = torch.randn(shape)
    codes, scale = quantize(w)
    back = dequantize(codes, scale)
    # three mantissa bits: half a step is 2^-4 of the value, and 2^-10 of the scale below the normal range
    bound = torch.maximum(w.abs() / 16, scale.repeat_interleave(BLOCK, 0)[: shape[0], :1] / 1024)
    assert ((back - w).abs() <= bound * 1.001).all()
    again, same = quantize(back)
    assert torch.equal(dequantize(again, same), back)


def test_zeros_and_single_outliers_stay_in_their_block():
    w = torch.full((256, 256), 1e-3)
    w[:128, :128] = 0
    w[200, 200] = 1e4
    codes, scale = quantize(w)
    assert scale[0].tolist() == [1.0, scale[0, 1].item()]
    back = dequantize(codes, scale)
    assert not back[:128, :128].any()
    assert torch.allclose(back[:128, 128:], w[:128, 128:])
    assert back[200, 200] == 1e4
    assert not back[129, 129:200].any()


def test_a_part_takes_the_scales_of_where_it_lies():
    codes, scale = quantize(torch.randn(300, 300) * torch.arange(1, 301)[:, None])
    whole = dequantize(codes, scale)
    for rows, columns in (
        (slice(0, 12), slice(0, 300)),
        (slice(100, 140), slice(0, 300)),
        (slice(0, 9), slice(120, 260)),
    ):
        assert torch.equal(dequantize(codes[rows, columns], scale, rows.start, columns.start), whole[rows, columns])


@pytest.mark.parametrize("kind", [reference, deterministic], ids=["reference", "deterministic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(300, 200), (128, 128), (144, 384)])
def test_products(kind, dtype, rows, columns):
    codes, scale = quantize(torch.randn(rows, columns) / columns**0.5)
    exact = dequantize(codes, scale).double()
    for tokens in (0, 1, 7, 17):
        x = torch.randn(tokens, columns + 5).to(dtype)[:, 3 : 3 + columns]
        want = (x.double() @ exact.T).to(dtype)
        FP8_LINEAR.equality.check(kind.fp8_linear(x, codes, scale), want, f"{tokens} tokens")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_bits_do_not_know_the_other_rows(dtype):
    codes, scale = quantize(torch.randn(200, 300))
    x = torch.randn(19, 300).to(dtype)
    whole = deterministic.fp8_linear(x, codes, scale)
    for i in (0, 5, 18):
        assert torch.equal(deterministic.fp8_linear(x[i : i + 1], codes, scale)[0], whole[i])
    part = deterministic.fp8_linear(x, codes[128:].contiguous(), scale[1:])
    assert torch.equal(part, whole[:, 128:])


def test_the_floor_counts_one_byte_a_weight():
    plain = 2 * (6144 * 7168 + 8 * (7168 + 6144))
    assert floor(8, 6144, 7168).bytes == plain - 6144 * 7168 + 4 * 48 * 56
    assert floor(8, 6144, 7168).flops == 2 * 8 * 6144 * 7168


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tiles_have_names_and_hold_the_tokens_they_are_chosen_for(dtype):
    for tokens, rows in product((1, 16, 17, 32, 33, 64, 65, 128, 129, 5000), (1, 3648, 6144, 12288, 49152)):
        tile = choose(tokens, rows, dtype)
        assert parse(tile.name) == tile
        assert BLOCK % tile.R == BLOCK % tile.K == 0, "a tile lies in one scale block"
    assert parse("T16R64K128W4S5P") == Tile(T=16, R=64, K=128, warps=4, stages=5, split=True)
    assert not parse("T128R128K64W8S4").split


@pytest.mark.parametrize("name", ["", "T16", "T16R64K128W4S5Q", "T8R64K128W4S5", "T48R64K128W4S5", "T16R32K64W4S5",
                                  "T16R64K16W4S5", "T16R64K64W2S5", "T16R64K64W4S9"])  # fmt: skip
def test_a_tile_that_is_none_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"tile '?{name}'?: accepted"):
        parse(name)
