"""The MXFP4 products of few pairs on a CPU, through their real entry points, threads in a random order."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import emulated
from helpers.banks import Mxfp4Bank, mxfp4_bank, plain_bank, random_routing
from helpers.moe import SILU, SITU
from helpers.on_device import OnDevice

from anabranch.ops.experts import reference
from anabranch.ops.experts import triton as kernels
from anabranch.ops.experts.spec import EXPERTS
from anabranch.ops.glu.reference import glu
from anabranch.ops.mxfp4 import cuda

if why := emulated.why_not():
    pytest.skip(why, allow_module_level=True)

TOP_K = 3


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    return emulated.loaded(monkeypatch, "mxfp4")


def sorted_pairs(runs: list[int], tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs in a random order, `runs[0]` of them of expert 0, and so on, two or more of no expert; and their tiles."""
    order = torch.randperm(-(-(sum(runs) + 2) // TOP_K) * TOP_K).int()
    stops = [sum(runs[: e + 1]) for e in range(len(runs))]
    cuts = [
        (e, first, min(first + tile, stop))
        for e, (run, stop) in enumerate(zip(runs, stops, strict=True))
        for first in range(stop - run, stop, tile)
    ]
    cuts += [(-1, -(1 << 30), 1 << 30)] * 3  # of an entry without an expert nothing else may be read
    return order, torch.tensor(cuts, dtype=torch.int32).T.contiguous()


def check(runs: list[int], bank: Mxfp4Bank, tile: int, activation=SILU) -> None:
    order, table = sorted_pairs(runs, tile)
    width = bank.w2_packed.shape[1]
    x = (torch.randn(len(order) // TOP_K, width + 8) * 0.1).bfloat16()[:, 3 : 3 + width]
    got = cuda.products(x, order, table, bank, activation, TOP_K, tile)
    touched = torch.zeros(len(got), dtype=torch.bool)
    for e, first, last in table.T.tolist():
        if e < 0:
            continue
        pairs = order[first:last].long()
        hidden = glu((x[pairs // TOP_K].float() @ bank.gate_up(e).float().T).bfloat16(), activation)
        want = (hidden.float() @ bank.down(e).float().T).bfloat16()
        assert want.isfinite().all()
        EXPERTS.equality.check(got[pairs], want, f"expert {e}, pairs {first} to {last}")
        touched[pairs] = True
    assert got[~touched].isnan().all(), "a row that is nobody's was written"


@pytest.mark.parametrize(("runs", "tile"), [([3, 0, 8], 8), ([9, 17], 8), ([1, 16, 0], 16), ([5, 33], 16)])
def test_runs_of_any_length(runs, tile):
    check(runs, mxfp4_bank(len(runs), 128, 256, torch.bfloat16), tile)


@pytest.mark.parametrize(("inner", "width", "tile"), [(256, 128, 8), (128, 384, 8), (384, 640, 16), (128, 1152, 16)])
def test_columns_that_fill_no_stage(inner, width, tile):
    check([4, 7], mxfp4_bank(2, inner, width, torch.bfloat16), tile, SITU)


@pytest.mark.parametrize("tile", [8, 16])
def test_scales_of_either_size_and_at_the_end_of_the_range(tile):
    """A warp whose scales are all at most 2^0 multiplies once a weight, another twice."""
    bank = mxfp4_bank(2, 128, 256, torch.bfloat16)
    bank.w13_scale[0, 70], bank.w13_scale[:, 3, ::2] = 130, 0
    bank.w2_scale[1, :64, 1], bank.w2_scale[0, 9] = 131, 1
    check([5, 11], bank, tile)


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_any_order_of_threads(module, seed):
    """More pieces than stages and programs: a ring that is refilled too early shows."""
    module.seed(seed)
    check([2, 9, 1, 8], mxfp4_bank(4, 256, 384, torch.bfloat16), 8)


def test_a_token_of_nan_stays_alone():
    """Its row lies in the tiles of others, and behind the ends of shorter tiles that come later."""
    bank, (_, chosen) = mxfp4_bank(4, 128, 256, torch.bfloat16), random_routing(14, 4, 2)
    x = (torch.randn(14, 256) * 0.1).bfloat16()
    want = cuda.expert_products(x, chosen, bank, SILU)
    x[::5] = torch.nan
    got = cuda.expert_products(x, chosen, bank, SILU).view(14, 2, 256)
    assert got[::5].isnan().all()
    kept = torch.arange(14) % 5 != 0
    assert torch.equal(got[kept], want.view(14, 2, 256)[kept])


@pytest.mark.parametrize("tile", [None, 8, 16])
def test_experts_of_one_rank_behind_the_sort(tile):
    """Against the Triton kernels; NaN where another rank's rows would be."""
    bank = mxfp4_bank(3, 128, 256, torch.bfloat16, first=2, total=7)
    x, (_, chosen) = (torch.randn(11, 256) * 0.1).bfloat16(), random_routing(11, 7, 2)
    got, local = cuda.expert_products(x, chosen, bank, SITU, tile), ((chosen >= 2) & (chosen < 5)).flatten()
    assert got[~local].isnan().all()
    want = kernels.expert_products(x, chosen, bank, SITU)
    EXPERTS.equality.check(got[local], want[local])


def test_steps_of_few_pairs_an_expert_are_worth_it(monkeypatch):
    """Counted over the experts of all ranks."""
    monkeypatch.setattr(cuda, "available", lambda device: True)
    bank = mxfp4_bank(2, 128, 256, torch.bfloat16, total=64)
    assert [n for n in range(1, 200) if cuda.worth(OnDevice(n, 256), 8, bank)] == [*range(1, 113)]
    assert reference.mean_pairs(112, 8, bank) == cuda.MOST
    assert not cuda.worth(OnDevice(8, 256), 8, mxfp4_bank(2, 96, 256, torch.bfloat16, total=64))
    assert not cuda.worth(OnDevice(8, 256), 8, plain_bank(2, 128, 256, torch.bfloat16))


def test_what_the_kernels_cannot_read_is_refused():
    bank, x = mxfp4_bank(2, 128, 256, torch.bfloat16), torch.zeros(4, 256).bfloat16()
    _, chosen = random_routing(4, 2, 1)
    wide = mxfp4_bank(1, 128, 4096, torch.bfloat16)
    for other, rows, message in (
        (plain_bank(2, 128, 256, torch.bfloat16), x, "plain experts"),
        (bank, x.float(), "of torch.float32 rows"),
        (wide, torch.zeros(4, 4096).bfloat16(), "width 4096, not a multiple of 128 up to 3968"),
        (mxfp4_bank(2, 96, 256, torch.bfloat16), x, "inner width 96, not a multiple of 128"),
        (bank, torch.zeros(256, 4).bfloat16().T, "rows with strides"),
        (replace(bank, w2_packed=bank.w2_packed.mT.contiguous().mT), x, "codes or scales that are not dense"),
    ):
        with pytest.raises(ValueError, match=message):
            cuda.expert_products(rows, chosen, other, SILU, 8)
