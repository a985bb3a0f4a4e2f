"""The CUDA block-FP8 product on a CPU, by its real entry point: threads in a random order, TMA and products late."""

import re
from typing import Any

import pytest
import torch
from helpers import emulated

from anabranch.ops.fp8_linear import cuda, layout, reference
from anabranch.ops.fp8_linear.reference import BLOCK, CODES, quantize
from anabranch.ops.fp8_linear.spec import FP8_LINEAR
from anabranch.ops.skinny_gemm.configs import Clusters
from anabranch.ops.spec import BITWISE

if why := emulated.why_not():
    pytest.skip(why, allow_module_level=True)

DEVICE = Clusters(2, 1, 0)  # so that tiles take turns
SOURCE = (emulated.EMULATOR / "fp8_linear.cpp").read_text()
BUILT = {tuple(int(n) for n in v) for v in re.findall(r"V\((\d), (\d+), (\d), (\d)\)", SOURCE)}


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    return emulated.loaded(monkeypatch, "fp8_linear")


def layouts(tokens: int, rows: int, columns: int) -> list[layout.Layout]:
    found = layout.candidates(tokens, rows, columns, DEVICE)
    return [x for x in found if (x.XR, x.T, x.WGS, x.KB) in BUILT]


def weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every scale differs, by up to a factor of 25 between rows."""
    codes, scale = quantize(torch.randn(rows, columns) * torch.linspace(0.2, 5, rows)[:, None] / columns**0.5)
    return codes, scale * (0.5 + torch.rand_like(scale))


# tiles over several scale blocks, in one to three passes; parts of 1 and 2 blocks; two parts without a block
@pytest.mark.parametrize(("rows", "columns"), [(296, 1024), (152, 768), (136, 256)])
def test_every_layout_is_right_with_the_same_bits(rows, columns, module):
    codes, scale = weight(rows, columns)
    x = torch.randn(128, columns + 8).bfloat16()[:, 8:]
    exact = (x.double() @ reference.dequantize(codes, scale).double().T).bfloat16()
    bits: list[torch.Tensor] = []
    for m in (5, 13, 27, 60, 128):
        found = layouts(m, rows, columns)
        assert found
        for seed, wanted in enumerate(found):
            module.seed(seed + m)
            got = cuda.multiply(x[:m], codes, scale, wanted)
            FP8_LINEAR.equality.check(got, exact[:m], f"M={m} {wanted}")
            bits.append(got[:5])
            BITWISE.check(got[:5], bits[0], f"M={m} {wanted}")


def test_part_of_a_merged_weight_has_its_bits():
    codes, scale = weight(384, 512)
    x = torch.randn(3, 512).bfloat16()
    wanted = {rows: layouts(3, rows, 512)[0] for rows in (384, 128, 64)}
    whole = cuda.multiply(x, codes, scale, wanted[384])
    for first, last in ((128, 256), (256, 320)):
        part = cuda.multiply(x, codes[first:last], scale[first // BLOCK :], wanted[last - first])
        BITWISE.check(part, whole[:, first:last].contiguous(), f"rows {first} to {last}")


def test_all_codes_and_nan_where_a_weight_is_nan():
    codes = torch.arange(256).to(torch.uint8).repeat(32, 2)
    codes[(codes & 0x7F) == 0x7F] = 0
    scale, x = torch.rand(1, 4) + 0.5, torch.randn(5, 512).bfloat16()
    [wanted, *_] = layouts(5, 32, 512)
    exact = (x.double() @ reference.dequantize(codes.view(CODES), scale).double().T).bfloat16()
    FP8_LINEAR.equality.check(cuda.multiply(x, codes.view(CODES), scale, wanted), exact)
    codes[3, 500], codes[20, 17] = 0x7F, 0xFF
    got = cuda.multiply(x, codes.view(CODES), scale, wanted)
    assert got.isnan().any(0).nonzero().flatten().tolist() == [3, 20]
    assert got[:, [3, 20]].isnan().all()


def test_bad_calls_are_refused_by_name():
    codes, scale = weight(152, 768)
    x = torch.randn(9, 768).bfloat16()
    [wanted, *_] = layouts(8, 152, 768)
    with pytest.raises(ValueError, match="tokens is 9"):
        cuda.multiply(x, codes, scale, wanted)
    for bad, what in ((scale[:, :3], "columns of scale"), (scale[:1], "rows of scale")):
        with pytest.raises(ValueError, match=what):
            cuda.multiply(x[:8], codes, bad, wanted)
    with pytest.raises(ValueError, match="columns of codes"):
        cuda.multiply(x[:8], codes[:, :512], scale, wanted)
