"""The CUDA attention of a decode step on a CPU, by its real entry point: threads in a random order, copies late."""

from typing import Any

import pytest
import torch
from helpers import emulated

from anabranch.ops import native
from anabranch.ops.gate.reference import sigmoid_gate
from anabranch.ops.mla import attend

if why := emulated.why_not():
    pytest.skip(why, allow_module_level=True)

RANK, ROPE, PAGE, NOPE = attend.RANK, attend.ROPE, attend.PAGE, 128


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    built = emulated.module("mla")
    monkeypatch.setattr(native, "load", lambda folder: built)
    return built


def share_of(tiles: int, programs: int, least: int) -> int:
    """Shares are equal; those below `least` are doubled, up to that."""
    return max(1, -(-tiles // programs), min(least, -(-2 * tiles // programs)))


class Case:
    """Requests of the given totals over poisoned pages, queries in slices of wider rows."""

    def __init__(self, totals: list[int], heads: int) -> None:
        torch.manual_seed(sum(totals))
        used = [-(-t // PAGE) for t in totals]
        free = iter(torch.randperm(sum(used) + 2).tolist())
        self.pages = torch.full((sum(used) + 2, PAGE, RANK + ROPE), torch.nan).bfloat16()
        self.table, self.rows = torch.zeros(len(totals), max(used) + 2, dtype=torch.int64), []
        for b, total in enumerate(totals):
            rows = torch.randn(total, RANK + ROPE).bfloat16() * 0.5
            for j, part in enumerate(rows.split(PAGE)[: used[b]]):
                self.table[b, j] = next(free)
                self.pages[self.table[b, j], : len(part)] = part
            self.rows.append(rows.float())
        wide = torch.randn(len(totals), heads * (NOPE + ROPE) + 40).bfloat16()
        self.q = wide[:, : heads * (NOPE + ROPE)].unflatten(1, (heads, NOPE + ROPE))
        self.absorbed = torch.randn(len(totals), heads, RANK).bfloat16()
        self.totals, self.heads = torch.tensor(totals), heads

    def check(self, programs: int, least: int = 1, early: bool = True) -> None:
        """Every piece is what its rows give, and nothing else is written."""
        pieces = programs + len(self.totals)
        acc = torch.full((pieces, self.heads, RANK), torch.nan)
        stats = torch.full((pieces, self.heads, 2), torch.nan)
        places = (self.absorbed, self.q, self.pages, self.table, self.totals, acc, stats)
        attend.attend(*places, programs, least, True, early)
        tiles = [-(-len(rows) // PAGE) for rows in self.rows]
        share, begin, written = share_of(sum(tiles), programs, least), 0, []
        query = torch.cat([self.absorbed, self.q[..., NOPE:]], -1).float()
        for b, count in enumerate(tiles):
            for p in range(programs):
                first, last = max(p * share, begin), min(p * share + share, begin + count)
                if first < last:
                    written.append(p + b)
                    rows = self.rows[b][(first - begin) * PAGE : (last - begin) * PAGE]
                    score = query[b] @ rows.mT * (NOPE + ROPE) ** -0.5 * 1.4426950408889634
                    top = score.amax(1)
                    weights = torch.exp2(score - top[:, None])
                    torch.testing.assert_close(stats[p + b, :, 0], top, rtol=1e-4, atol=1e-4)
                    torch.testing.assert_close(stats[p + b, :, 1], weights.sum(1), rtol=1e-3, atol=1e-3)
                    torch.testing.assert_close(acc[p + b], weights @ rows[:, :RANK], rtol=1e-2, atol=5e-2)
            begin += count
        others = sorted(set(range(pieces)) - set(written))
        assert acc[others].isnan().all()
        assert stats[others].isnan().all()


@pytest.mark.parametrize("heads", [16, 32, 13, 29])
def test_heads_of_one_block_and_of_half_a_block(module, heads):
    module.seed(heads)
    Case([150], heads).check(3)
    Case([1, 200, 0, 64, 65], heads).check(2)


@pytest.mark.parametrize("early", [False, True])
def test_shares_cross_requests_and_blocks_of_heads(module, early):
    """More requests than lanes, stages that come round, programs without work, doubled shares, two blocks of heads."""
    module.seed(7)
    Case([100, 0, 33] * 12, 5).check(6, 1, early)
    Case([260, 80, 1], 34).check(9, 4, early)
    Case([0, 0], 3).check(2, 1, early)


def test_tokens_of_one_sequence_share_a_table(module):
    """Rows that see 61 to 70 of its tokens, and one of padding; nothing may be read early."""
    module.seed(3)
    whole, case = Case([70], 5), Case([1] * 11, 5)
    case.pages, case.table = whole.pages, whole.table.expand(11, -1)
    case.totals = torch.tensor([*range(61, 71), 0])
    case.rows = [whole.rows[0][:total] for total in case.totals.tolist()]
    case.check(4, early=False)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("totals", "programs", "least"), [([500], 9, 1), ([40, 0, 1, 600], 5, 4), ([6000], 90, 1), ([900], 20, 3)]
)
def test_leave_merges_and_multiplies(module, early, totals, programs, least):
    """Pieces of no request stay poisoned; more of them than lanes; a last block of columns that is not full."""
    module.seed(len(totals))
    torch.manual_seed(programs)
    heads, width = 3, 40
    weight = (torch.randn(heads, NOPE + width, RANK).bfloat16() * RANK**-0.5)[:, NOPE:]
    acc = torch.full((programs + len(totals), heads, RANK), torch.nan)
    stats = torch.full((programs + len(totals), heads, 2), torch.nan)
    tiles = [-(-t // PAGE) for t in totals]
    share, begin, mixtures = share_of(sum(tiles), programs, least), 0, []
    for b, count in enumerate(tiles):
        own = [p + b for p in range(programs) if max(p * share, begin) < min(p * share + share, begin + count)]
        begin += count
        acc[own], stats[own] = torch.randn(len(own), heads, RANK), torch.rand(len(own), heads, 2) * 4
        raised = torch.exp2(stats[own, :, 0] - stats[own, :, 0].amax(0) if own else stats[own, :, 0])
        norm = (raised * stats[own, :, 1]).sum(0)[:, None] if own else torch.ones(heads, 1)
        mixtures.append(((acc[own] * raised[..., None]).sum(0) / norm).bfloat16())
    mixed, shares = torch.stack(mixtures), (programs, least, True, early)
    pieces, gate = (acc, stats, torch.tensor(totals)), torch.randn(len(totals), heads * width + 8).bfloat16()[:, 8:]
    got = attend.leave(*pieces, weight, None, *shares)
    want = torch.einsum("bhr,hvr->bhv", mixed.float(), weight.float())
    torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)
    gated = attend.leave(*pieces, weight, gate, programs, least, chained=False, early=False).flatten(1)
    assert torch.equal(gated, sigmoid_gate(got.flatten(1), gate))
    torch.testing.assert_close(attend.leave(*pieces, None, None, *shares), mixed, rtol=1e-2, atol=1e-2)


def test_only_rows_on_16_bytes_of_one_shape_fit():
    case, kv_b = Case([70], 5), torch.zeros(5, NOPE + 128, RANK).bfloat16()
    assert attend.fits(case.q, case.pages, kv_b)
    assert not attend.fits(case.q, case.pages[:, :32], kv_b)
    assert not attend.fits(case.q.float(), case.pages, kv_b)
    assert not attend.fits(case.q, case.pages, kv_b[..., 8:])
    wide = torch.zeros(2, 5 * (NOPE + ROPE) + 4).bfloat16()
    assert not attend.fits(wide[:, 4:].unflatten(1, (5, NOPE + ROPE)), case.pages, kv_b)
