"""The grouped products of prompts on a CPU, through their real entry points, threads in a random order."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import emulated
from helpers.banks import PlainBank, plain_bank
from helpers.moe import SILU, SITU

from anabranch.config.model import ActivationConfig
from anabranch.ops import native
from anabranch.ops.experts import grouped
from anabranch.ops.experts.spec import EXPERTS
from anabranch.ops.experts.tiles import Tiles
from anabranch.ops.glu.reference import glu

if why := emulated.why_not():
    pytest.skip(why, allow_module_level=True)

TOP_K = 3


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.manual_seed(0)
    built = emulated.module("experts")
    built.seed(1)
    monkeypatch.setattr(native, "load", lambda folder: built)
    return built


def sorted_tiles(runs: list[int]) -> Tiles:
    """A random order of pairs, the first `runs[0]` of expert 0, and so on; a few behind them have no expert."""
    order = torch.randperm(-(-(sum(runs) + 2) // TOP_K) * TOP_K).int()
    stops = [sum(runs[: e + 1]) for e in range(len(runs))]
    cuts: list[tuple[int, int, int]] = []
    for e, (run, stop) in enumerate(zip(runs, stops, strict=True)):
        tiles = max(-(-(run - grouped.TAIL) // grouped.TILE), 1) if run else 0
        bounds = [*range(stop - run, stop - run + tiles * grouped.TILE, grouped.TILE), stop]
        cuts += [(e, first, last) for first, last in pairwise(bounds)] if run else []
    cuts += [(-1, -(1 << 30), 1 << 30)] * 3  # of an entry without an expert nothing else may be read
    return Tiles(pairs=order, table=torch.tensor(cuts, dtype=torch.int32).T.contiguous())


def check(runs: list[int], inner: int, width: int, activation: ActivationConfig, programs: int) -> None:
    bank, tiles = plain_bank(len(runs), inner, width, torch.bfloat16, spread=0.1), sorted_tiles(runs)
    x = torch.randn(tiles.pairs.numel() // TOP_K, width + 8).bfloat16()[:, :width]
    got = grouped.products(x, tiles, TOP_K, bank, activation, programs)
    touched = torch.zeros(len(got), dtype=torch.bool)
    for e, first, last in tiles.table.T.tolist():
        if e < 0:
            continue
        pairs = tiles.pairs[first:last].long()
        hidden = glu((x[pairs // TOP_K].float() @ bank.gate_up(e).float().T).bfloat16(), activation)
        want = (hidden.float() @ bank.down(e).float().T).bfloat16()
        EXPERTS.equality.check(got[pairs], want, f"expert {e}, {last - first} pairs")
        touched[pairs] = True
    assert got[~touched].isnan().all(), "a row that is nobody's was written"


@pytest.mark.parametrize("runs", [[1, 0, 63, 64], [65, 0, 2], [300, 1], [288, 97]])
def test_runs_of_any_length(runs):
    check(runs, 64, 128, SILU, programs=2)


@pytest.mark.parametrize(("inner", "width", "programs"), [(72, 136, 3), (8, 8, 1), (104, 328, 5)])
def test_widths_that_fill_no_tile(inner, width, programs):
    check([5, 33], inner, width, SILU, programs)


def test_situ_and_its_caps():
    check([40], 64, 64, SITU, 1)


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_any_order_of_threads(module, seed):
    """More pieces than stages and programs: a ring that is refilled too early shows."""
    module.seed(seed)
    check([3, 31, 17], 136, 264, SILU, programs=1)


def test_what_the_kernels_cannot_read_is_refused():
    bank, tiles = plain_bank(1, 12, 64, torch.bfloat16), sorted_tiles([3])
    with pytest.raises(ValueError, match="multiples of 8"):
        grouped.products(torch.zeros(2, 64).bfloat16(), tiles, TOP_K, bank, SILU, 1)
    fp32 = PlainBank(first=0, count=1, w13=torch.zeros(1, 16, 64), w2=torch.zeros(1, 64, 8))
    assert not grouped.fits(torch.zeros(2, 64), fp32)


@pytest.mark.parametrize(
    ("pairs", "choices", "first", "count", "tile"),
    [(3, 4, 0, 4, 256), (9001, 40, 0, 40, 256), (5000, 9, 2, 5, 256), (4097, 600, 77, 512, 32), (700, 3, 5, 6, 64)],
)
def test_pairs_are_sorted_into_tiles(monkeypatch, pairs, choices, first, count, tile):
    monkeypatch.setattr(grouped, "TILE", tile)
    chosen = torch.randint(0, choices, (pairs, 1))
    chosen[: pairs // 3] = first + 1  # a long run
    tiles, local = grouped.sort(chosen, first, count), chosen.flatten() - first
    end = 0
    for expert in range(count):
        mine = (local == expert).nonzero().flatten()
        entries = tiles.table[:, tiles.table[0] == expert].T.tolist()
        assert len(entries) == (max(-(-(len(mine) - 32) // tile), 1) if len(mine) else 0)
        for n, (_, start, stop) in enumerate(entries):
            assert start == end
            assert (stop - start) % 32 == 0 or n + 1 == len(entries)
            assert 0 < stop - start <= tile + 32
            end = stop
        got = tiles.pairs[end - len(mine) : end]
        assert torch.equal(got.sort().values.long(), mine), f"pairs of expert {expert}"
    used = int((tiles.table[0] >= 0).sum())
    assert (tiles.table[0, used:] == -1).all()
    units = -(-(tiles.table[2, :used] - tiles.table[1, :used]) // 32)
    assert (units.diff() <= 1).all(), "the largest first; those of one expert differ by one unit"
