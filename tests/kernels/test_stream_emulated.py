"""The streamed products of few pairs on a CPU, through their real entry points, threads in a random order."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import emulated
from helpers.banks import plain_bank
from helpers.moe import SILU, SITU
from helpers.on_device import OnDevice

from anabranch.config.model import ActivationConfig
from anabranch.ops.experts import stream
from anabranch.ops.experts.spec import EXPERTS
from anabranch.ops.experts.tiles import Tiles
from anabranch.ops.glu.reference import glu

if why := emulated.why_not():
    pytest.skip(why, allow_module_level=True)

TOP_K = 3


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    return emulated.loaded(monkeypatch, "experts", "stream")


def tiles(runs: list[int]) -> Tiles:
    """Pairs in a random order, the first `runs[0]` places of expert 0, and so on; those behind them have no expert."""
    cuts, at = [], 0
    for expert, run in enumerate(runs):
        cuts += [(expert, at + first, at + min(first + stream.TILE, run)) for first in range(0, run, stream.TILE)]
        at += run
    cuts += [(-1, -(1 << 30), 1 << 30)] * 3  # of an entry without an expert nothing else may be read
    pairs = torch.randperm(-(-(at + 2) // TOP_K) * TOP_K).int()
    return Tiles(pairs=pairs, table=torch.tensor(cuts, dtype=torch.int32).T.contiguous())


def check(runs: list[int], inner: int, width: int, activation: ActivationConfig = SILU, programs: int = 3) -> None:
    bank, made = plain_bank(len(runs), inner, width, torch.bfloat16, spread=0.1), tiles(runs)
    x = torch.randn(made.pairs.numel() // TOP_K, width + 8).bfloat16()[:, :width]
    got = stream.products(x, made, bank, activation, TOP_K, programs)
    touched = torch.zeros(len(got), dtype=torch.bool)
    for e, first, last in made.table.T.tolist():
        if e < 0:
            continue
        pairs = made.pairs[first:last].long()
        hidden = glu((x[pairs // TOP_K].float() @ bank.gate_up(e).float().T).bfloat16(), activation)
        want = (hidden.float() @ bank.down(e).float().T).bfloat16()
        EXPERTS.equality.check(got[pairs], want, f"expert {e}, pairs {first} to {last}")
        touched[pairs] = True
    assert got[~touched].isnan().all(), "a row that is nobody's was written"


@pytest.mark.parametrize("runs", [[1, 0, 8, 9], [17, 40], [64, 5, 33, 65]])
def test_runs_of_any_length(runs):
    check(runs, 64, 128)


@pytest.mark.parametrize(("inner", "width"), [(72, 136), (8, 8), (104, 328)])
def test_widths_that_fill_no_piece(inner, width):
    check([5, 33], inner, width)


def test_situ_and_its_caps():
    check([12], 64, 64, SITU, programs=1)


@pytest.mark.parametrize("seed", [2, 3])
def test_any_order_of_threads(module, seed):
    """More pieces than stages and programs: a ring that is refilled too early shows."""
    module.seed(seed)
    check([3, 31, 17], 136, 1000)


def test_what_the_kernels_cannot_read_is_refused():
    bank = plain_bank(1, 12, 64, torch.bfloat16)
    with pytest.raises(ValueError, match="multiples of 8"):
        stream.products(torch.zeros(2, 64).bfloat16(), tiles([3]), bank, SILU, TOP_K, 1)


def test_steps_of_few_pairs_an_expert_are_worth_it(monkeypatch):
    """Counted over the experts of all ranks; never those beside which a shared expert rides."""
    monkeypatch.setattr(stream, "available", lambda device: True)
    for total, taken in ((256, range(96, 641)), (64, range(65, 161))):
        bank = replace(plain_bank(2, 8, 64, torch.bfloat16), total=total)
        assert [n for n in range(1, 700) if stream.worth(OnDevice(n, 64), 8, bank)] == [*taken]
        assert not stream.worth(OnDevice(128, 68), 8, bank)
