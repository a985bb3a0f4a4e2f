"""MXFP4 experts in the interpreter: arranged columns, every code and scale, shapes with and without whole blocks."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from helpers.banks import mxfp4_bank, plain_bank, random_routing
from helpers.moe import SITU
from helpers.mxfp4 import arrangement, tiles_are_exact
from helpers.on_device import OnDevice

from anabranch.ops.experts import grouped, reference
from anabranch.ops.experts import triton as kernels
from anabranch.ops.experts.plan import Plan, Tile, choose_plan
from anabranch.ops.experts.spec import EXPERTS
from anabranch.ops.mxfp4.triton import ARRANGED, NATIVE, ORDERED, _scale_bytes, arrange, tile_form


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_arranged_tiles_hold_every_code_under_every_scale():
    tiles_are_exact("cpu", asm=False)


@triton.jit
def _split(four, high, low, N: tl.constexpr):
    at = tl.arange(0, N)
    upper, lower = _scale_bytes(tl.load(four + at))
    tl.store(high + at, upper)
    tl.store(low + at, lower)


def test_bytes_of_every_scale_beside_every_neighbour_that_could_carry():
    """The bits of bf16 2^(s-127), made four at a time."""
    s = torch.arange(256)
    four = torch.cat(
        [torch.stack([s, torch.full_like(s, near), s.flip(0), s], -1) for near in (0, 1, 127, 128, 254, 255)]
    )
    four = four.to(torch.uint8)
    rows = triton.next_power_of_2(len(four))
    padded = torch.zeros(rows, 4, dtype=torch.uint8)
    padded[: len(four)] = four
    high, low = torch.empty_like(padded), torch.empty_like(padded)
    _split[(1,)](padded.view(torch.uint32), high.view(torch.uint32), low.view(torch.uint32), N=rows)
    want = torch.cat([torch.tensor([0x0040]), torch.arange(1, 255) << 7, torch.tensor([0x7FC0])])[padded.long()]
    assert torch.equal(high.long(), want >> 8)
    assert torch.equal(low.long(), want & 255)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_arrange_is_a_permutation_of_every_block(dtype):
    wide = torch.randn(5, 1300).to(dtype)
    x = wide[:, 3 : 3 + 1152]
    assert torch.equal(arrange(x), x[:, arrangement(1152)])
    assert arrangement(128)[:4].tolist() == [0, 4, 8, 12]


def test_how_tiles_are_made_depends_on_the_matrix_alone():
    assert [tile_form(c, torch.bfloat16) for c in (128, 3584, 192, 96)] == [ARRANGED, ARRANGED, ORDERED, ORDERED]
    assert tile_form(128, torch.float32) == ORDERED
    assert NATIVE not in [tile_form(c, torch.bfloat16) for c in (128, 192)]  # no PTX in the interpreter


@pytest.mark.parametrize(("tokens", "inner", "width"), [(1, 128, 256), (17, 128, 256), (3, 96, 128), (17, 128, 96)])
def test_experts_with_blocks_of_columns_on_either_side(tokens, inner, width):
    """One token, few and a sorted run; NaN where another rank's rows would be."""
    bank = mxfp4_bank(2, inner, width, torch.bfloat16, first=2, total=5)
    bank.w13_scale[0, 0, 0] = 0  # the subnormal scale
    x, (weights, chosen) = torch.randn(tokens, width).bfloat16() * 0.1, random_routing(tokens, 5, 2)
    got = kernels.routed_experts(x, weights, chosen, bank, SITU)
    want = reference.routed_experts(x, weights, chosen, bank, SITU)
    assert want.isfinite().all()
    EXPERTS.equality.check(got.bfloat16(), want.bfloat16())


def test_a_tile_of_other_columns_is_refused():
    bank, x = mxfp4_bank(3, 128, 128, torch.bfloat16), torch.zeros(2, 128).bfloat16()
    tile = Tile(T=16, R=64, K=128)
    with pytest.raises(ValueError, match="MXFP4 tiles take 128 columns a step, got 128 and 64"):
        kernels.routed_experts(
            *(x, *random_routing(2, 3, 1), bank, SITU), plan=Plan(wide=tile, narrow=replace(tile, K=64))
        )


def test_tiles_are_chosen_by_the_pairs_of_a_local_expert(monkeypatch):
    """56 of 896 experts, 512 rows of 16 choices: about 9 pairs an expert, not 146."""
    asked, bank = [], mxfp4_bank(56, 32, 32, torch.bfloat16, first=112, total=896)
    monkeypatch.setattr(kernels, "choose_plan", lambda *args: asked.append(args) or choose_plan(*args))
    kernels.routed_experts(torch.zeros(40, 32).bfloat16(), *random_routing(40, 896, 1), bank, SITU)
    assert asked == [(40, 1, 896, torch.bfloat16, True)]
    assert reference.mean_pairs(512, 16, bank) == pytest.approx(9.14, abs=0.01)
    assert choose_plan(512, 16, 896, torch.bfloat16, True).T == 16
    assert choose_plan(512, 16, 56, torch.bfloat16, True).T == 64, "what counting other ranks' pairs took"


def test_grouped_products_count_no_pairs_of_other_ranks(monkeypatch):
    monkeypatch.setattr(grouped, "available", lambda device: True)
    whole, part = (plain_bank(n, 8, 8, torch.bfloat16) for n in (256, 16))
    part.total, most = 256, grouped.LEAST * 256 // 8
    for bank in (whole, part):
        assert not grouped.worth(OnDevice(most, 8), 8, bank)
        assert grouped.worth(OnDevice(most + 1, 8), 8, bank)
    assert replace(part, total=0).total == 16
