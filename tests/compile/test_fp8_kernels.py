"""The block-FP8 product at the shapes of the released models: fits an H200, no spills, wgmma (check 11)."""

import pytest
import torch

from anabranch.ops.fp8_linear.expanded import by_library
from anabranch.ops.fp8_linear.reference import CODES, blocks
from anabranch.ops.fp8_linear.triton import fp8_linear

# QKVG, MLA whole and o_proj of Kimi-K3 at TP8; QKV of Kimi-Linear
SHAPES = [(6144, 7168), (3648, 7168), (7168, 1536), (12288, 2304)]


def launch(tokens: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    x = torch.empty(tokens, columns, dtype=dtype, device="meta")
    codes = torch.empty(rows, columns, dtype=CODES, device="meta")
    fp8_linear(x, codes, torch.empty(blocks(rows), blocks(columns), device="meta"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 17, 64, 128, 512])
def test_half_precision_activations(compiled, tokens, dtype):
    for rows, columns in SHAPES:
        launch(tokens, rows, columns, dtype)
    products = [used for used in compiled.check() if used.name == "_fp8_linear"]
    assert len(products) == len(SHAPES)
    for used in products:
        assert "wgmma.mma_async.sync.aligned.m64" in used.ptx
        assert "\tmma.sync" not in used.ptx
        assert "cvt.rn.bf16.f16" not in used.ptx, "F2F, one for each value"


def test_fp32_activations(compiled):
    launch(4, 6144, 7168, torch.float32)
    compiled.check()


def test_expanding(compiled):
    x = torch.empty(512, 7168, dtype=torch.bfloat16, device="meta")
    codes = torch.empty(6144, 7168, dtype=CODES, device="meta")
    assert by_library(x, codes, torch.empty(48, 56, device="meta")).shape == (512, 6144)
    [used] = compiled.check()
    assert used.name == "_expand"
