"""The grouped products of prompts on a CPU, through their real entry points, threads in a random order."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import emulated
from helpers.banks import PlainBank, plain_bank
from helpers.moe import SILU, SITU

from anabranch.config.model import ActivationConfig
from anabranch.ops.experts import grouped
from anabranch.ops.experts.spec import EXPERTS
from anabranch.ops.glu.reference import glu

if why := emulated.why_not():
    pytest.skip(why, allow_module_level=True)

TOP_K = 3


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    return emulated.loaded(monkeypatch, "experts")


def sorted_pairs(runs: list[int], tile: int) -> grouped.Sorted:
    """Pairs in a random order, the first `runs[0]` places of expert 0, and so on; those behind them have no expert."""
    total = sum(runs)
    places = torch.randperm(-(-(total + 2) // TOP_K) * TOP_K).int()
    places[places >= total] = -1
    stops = [sum(runs[: e + 1]) for e in range(len(runs))]
    cuts: list[tuple[int, int, int]] = []
    for e, (run, stop) in enumerate(zip(runs, stops, strict=True)):
        tiles = max(-(-(run - grouped.TAIL) // tile), 1) if run else 0
        bounds = [*range(stop - run, stop - run + tiles * tile, tile), stop]
        cuts += [(e, first, last) for first, last in pairwise(bounds)] if run else []
    cuts += [(-1, -(1 << 30), 1 << 30)] * 3  # of an entry without an expert nothing else may be read
    table = torch.tensor(cuts, dtype=torch.int32).T.contiguous()
    return grouped.Sorted(places=places, table=table, most=tile + grouped.TAIL)


def check(
    runs: list[int], inner: int, width: int, activation: ActivationConfig, programs: int, tile: int = grouped.TILES[1]
) -> None:
    bank, made = plain_bank(len(runs), inner, width, torch.bfloat16, spread=0.1), sorted_pairs(runs, tile)
    x = torch.randn(made.places.numel() // TOP_K, width + 8).bfloat16()[:, :width]
    got = grouped.products(x, made, bank, activation, programs)
    touched = torch.zeros(len(got), dtype=torch.bool)
    for e, first, last in made.table.T.tolist():
        if e < 0:
            continue
        pairs = ((made.places >= first) & (made.places < last)).nonzero().flatten()
        hidden = glu((x[pairs // TOP_K].float() @ bank.gate_up(e).float().T).bfloat16(), activation)
        want = (hidden.float() @ bank.down(e).float().T).bfloat16()
        EXPERTS.equality.check(got[pairs], want, f"expert {e}, {last - first} pairs")
        touched[pairs] = True
    assert got[~touched].isnan().all(), "a row that is nobody's was written"


@pytest.mark.parametrize("tile", grouped.TILES)
@pytest.mark.parametrize("runs", [[1, 0, 63, 64], [65, 0, 2], [300, 1], [272, 97], [160, 257]])
def test_runs_of_any_length(runs, tile):
    check(runs, 64, 128, SILU, 2, tile)


@pytest.mark.parametrize(("inner", "width", "programs"), [(72, 136, 3), (8, 8, 1), (104, 328, 5)])
def test_widths_that_fill_no_tile(inner, width, programs):
    check([5, 33], inner, width, SILU, programs)


def test_situ_and_its_caps():
    check([40], 64, 64, SITU, 1)


@pytest.mark.parametrize("tile", grouped.TILES)
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_any_order_of_threads(module, seed, tile):
    """More pieces than stages and programs: a ring that is refilled too early shows."""
    module.seed(seed)
    check([3, 31, 17], 136, 264, SILU, 1, tile)


def test_what_the_kernels_cannot_read_is_refused():
    bank, made = plain_bank(1, 12, 64, torch.bfloat16), sorted_pairs([3], grouped.TILES[1])
    with pytest.raises(ValueError, match="multiples of 8"):
        grouped.products(torch.zeros(2, 64).bfloat16(), made, bank, SILU, 1)
    fp32 = PlainBank(first=0, count=1, w13=torch.zeros(1, 16, 64), w2=torch.zeros(1, 64, 8))
    assert not grouped.fits(torch.zeros(2, 64), fp32)


@pytest.mark.parametrize(
    ("pairs", "choices", "first", "count", "tile"),
    [(3, 4, 0, 4, 256), (9001, 40, 0, 40, 240), (5000, 9, 2, 5, 128), (4097, 600, 77, 512, 32), (700, 3, 5, 6, 64)],
)
def test_pairs_are_sorted_into_tiles(pairs, choices, first, count, tile):
    chosen = torch.randint(0, choices, (pairs, 1))
    chosen[: pairs // 3] = first + 1  # a long run
    made, local = grouped.sort(chosen, first, count, tile), chosen.flatten() - first
    end, none = 0, (local < 0) | (local >= count)
    assert torch.equal(made.places == -1, none)
    for expert in range(count):
        mine = made.places[local == expert].sort().values
        entries = made.table[:, made.table[0] == expert].T.tolist()
        assert len(entries) == (max(-(-(len(mine) - 32) // tile), 1) if len(mine) else 0)
        assert torch.equal(mine, torch.arange(end, end + len(mine)).int()), f"pairs of expert {expert}"
        for n, (_, start, stop) in enumerate(entries):
            assert start == end
            assert (stop - start) % 32 == 0 or n + 1 == len(entries)
            assert 0 < stop - start <= tile + 32
            end = stop
    used = int((made.table[0] >= 0).sum())
    assert (made.table[0, used:] == -1).all()
    units = -(-(made.table[2, :used] - made.table[1, :used]) // 32)
    assert (units.diff() <= 1).all(), "the largest first; those of one expert differ by one unit"
