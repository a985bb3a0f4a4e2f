"""The balanced decode step and the cache write in Triton's interpreter: equal to the chain, whatever the shares."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.ops.gate import triton as gates
from anabranch.ops.mla import balanced, reference
from anabranch.ops.mla import triton as fixed
from anabranch.ops.mla.spec import MLA_STEP, MLA_WRITE

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
NOPE, ROPE, V, RANK, PAGE, PAGES = 24, 16, 20, 32, 32, 24


class Case:
    """Requests of the given totals, each with its last row not yet written; a total of 0 has no row."""

    def __init__(self, totals: list[int], heads: int, dtype: torch.dtype, seed: int = 0) -> None:
        torch.manual_seed(seed)
        queries, width = heads * (NOPE + ROPE), max(1, -(-max(totals) // PAGE)) + 2
        wide = torch.randn(len(totals), queries + RANK + ROPE + 8).to(dtype)
        self.q = wide[:, :queries].unflatten(1, (heads, NOPE + ROPE))
        self.kv = wide[:, queries : queries + RANK + ROPE]
        self.totals, self.weight = torch.tensor(totals), torch.rand(RANK).to(dtype)
        free = torch.randperm(PAGES * 4)
        self.table = free[: len(totals) * width].view(len(totals), width)
        self.pages = torch.full((PAGES * 4 + 1, PAGE, RANK + ROPE), torch.nan, dtype=dtype)
        self.rows = torch.full((len(totals),), -1)
        for i, total in enumerate(totals):
            for p in range(total - 1):
                self.pages[self.table[i, p // PAGE], p % PAGE] = torch.randn(RANK + ROPE).to(dtype)
            if total:
                self.rows[i] = self.table[i, (total - 1) // PAGE] * PAGE + (total - 1) % PAGE
        self.kv_b = (torch.randn(heads, NOPE + V, RANK) * 0.2).to(dtype)
        self.gate = torch.randn(len(totals), heads * V + 8).to(dtype)[:, 8:]

    def run(self, step, gated: bool, **options) -> tuple[torch.Tensor, torch.Tensor]:
        pages = self.pages.clone()
        gate = (lambda: self.gate) if gated else None
        shared = (self.rows, self.totals, self.table, pages, self.kv_b, gate)
        return step(self.q, self.kv, self.weight, 1e-5, *shared, **options), pages[:-1]

    def check(self, gated: bool = False, tiles: balanced.Tiles | None = None) -> torch.Tensor:
        """Outputs, and every written row; where nothing was written the poison stays."""
        tiles = tiles or few(len(self.totals), self.q.shape[1])
        got, pages = self.run(balanced.mla_step, gated, tiles=tiles)
        want, want_pages = self.run(reference.mla_step, gated)
        MLA_STEP.equality.check(got, want)
        MLA_WRITE.equality.check(pages, want_pages, "pages")
        return got


def few(requests: int, heads: int) -> balanced.Tiles:
    """The chosen launch constants with few programs: the interpreter runs one after another."""
    return replace(balanced.choose_tiles(requests, heads, PAGE), programs=9)


@DTYPES
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("heads", [3, 20])
def test_step_equals_the_chain(dtype, gated, heads):
    got = Case([1, 150, 0, PAGE, PAGE + 1, 2 * PAGE - 1], heads, dtype).check(gated)
    assert not got[2].any()
    Case([70], heads, dtype).check(gated)
    Case([0, 0], heads, dtype).check(gated)


@DTYPES
@pytest.mark.parametrize("history", [0, 45])
def test_tokens_of_one_sequence_share_a_table(dtype, history):
    """A captured rest of a prompt: each token sees those before it, padding sees nothing and has no row."""
    tokens, padding = 26, 3
    case, sees = Case([0] * (tokens + padding), 3, dtype), history + 1 + torch.arange(tokens)
    table = torch.randperm(PAGES)[:4]
    case.table = table[None].expand(tokens + padding, -1)
    for p in range(history):
        case.pages[table[p // PAGE], p % PAGE] = torch.randn(RANK + ROPE).to(dtype)
    case.totals[:tokens], case.rows[:tokens] = sees, table[(sees - 1) // PAGE] * PAGE + (sees - 1) % PAGE
    assert not case.check(tiles=few(tokens + padding, 3))[tokens:].any()


@settings(max_examples=8, deadline=None)
@given(
    totals=st.lists(st.one_of(st.just(0), st.integers(1, 130)), min_size=1, max_size=7),
    programs=st.integers(1, 9),
    least=st.integers(1, 3),
    rows=st.sampled_from([16, 32]),
    pieces=st.sampled_from([1, 2, 8]),
    columns=st.sampled_from([0, 16]),
    part=st.sampled_from([16, 32]),
)
def test_any_shares_give_the_same_answer(totals, programs, least, rows, pieces, columns, part):
    """Programs that do several requests, requests that take several programs, and programs left over."""
    tiles = balanced.Tiles(
        programs=programs,
        least=least,
        rows=rows,
        heads=16,
        pieces=pieces,
        columns=columns,
        slice=part,
    )
    Case(totals, 3, torch.float32, seed=sum(totals)).check(True, tiles=tiles)


def test_a_broken_request_breaks_no_other():
    case = Case([40, 70, 33], 3, torch.bfloat16)
    want = case.check()
    case.pages[case.table[1, 0], 3] = torch.nan
    got, _ = case.run(balanced.mla_step, False, tiles=few(3, 3))
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize("columns", [0, 32])
def test_gate_is_asked_once_and_rounds_as_the_operation_does(columns):
    case, asked = Case([40, 5], 3, torch.bfloat16), []
    tiles = replace(few(2, 3), columns=columns)
    plain, _ = case.run(balanced.mla_step, False, tiles=tiles)
    shared = (case.weight, 1e-5, case.rows, case.totals, case.table, case.pages.clone(), case.kv_b)
    gated = balanced.mla_step(case.q, case.kv, *shared, lambda: asked.append(1) or case.gate, tiles)
    assert asked == [1]
    assert torch.equal(gated, gates.sigmoid_gate(plain, case.gate))


@DTYPES
def test_write_knows_nothing_of_the_batch_and_skips_tokens_without_a_row(dtype):
    case = Case([1, 20, 0, 33, 64], 3, dtype)
    together, alone, want = (case.pages.clone() for _ in range(3))
    fixed.mla_write(case.kv, case.weight, 1e-5, case.rows, together)
    for i in reversed(range(5)):
        fixed.mla_write(case.kv[i : i + 1].clone(), case.weight, 1e-5, case.rows[i : i + 1], alone)
    reference.mla_write(case.kv, case.weight, 1e-5, case.rows, want)
    as_bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    assert torch.equal(together.view(as_bits), alone.view(as_bits))
    assert together[-1].isnan().all()
    MLA_WRITE.equality.check(together[:-1], want[:-1])
    fixed.mla_write(case.kv[:0], case.weight, 1e-5, case.rows[:0], together)
