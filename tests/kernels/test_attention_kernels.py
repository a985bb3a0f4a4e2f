"""Attention kernels in Triton's interpreter: equal to their references, and a token's bits are its own."""

import sys
from importlib import import_module
from types import ModuleType

import pytest
import torch

from anabranch.ops.conv import reference as conv_reference
from anabranch.ops.conv.spec import CONV
from anabranch.ops.conv.triton import conv
from anabranch.ops.kda_decode import reference as decode_reference
from anabranch.ops.kda_decode.spec import KDA_DECODE
from anabranch.ops.kda_decode.triton import kda_decode
from anabranch.ops.kda_prefill import reference as prefill_reference
from anabranch.ops.kda_prefill.spec import KDA_PREFILL
from anabranch.ops.kda_prefill.triton import kda_prefill
from anabranch.ops.kda_step import reference as step_reference
from anabranch.ops.kda_step.spec import KDA_STEP
from anabranch.ops.kda_step.triton import kda_step
from anabranch.ops.mla import reference as mla_reference
from anabranch.ops.mla import sdpa
from anabranch.ops.mla import triton as mla
from anabranch.ops.mla.spec import MLA_DECODE, MLA_PREFILL
from anabranch.ops.norm.reference import l2_norm
from anabranch.ops.segments import Segments

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
STATES = pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
H, D = 3, 16  # two tiles of value rows


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def token_inputs(n: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """q, k, v, g, beta; v is a slice of wider rows, as it comes from the merged projection."""
    v = torch.randn(n, 3 * H * D).to(dtype)[:, H * D : 2 * H * D].unflatten(1, (H, D))
    q, k = l2_norm(torch.randn(n, H, D)), l2_norm(torch.randn(n, H, D))
    return q, k, v, -torch.rand(n, H, D), torch.rand(n, H)


def pool(slots: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(slots, H, D, D).to(dtype)


@DTYPES
@STATES
def test_decode_step_equals_the_reference_and_leaves_other_slots_alone(dtype, state_dtype):
    x, state = token_inputs(3, dtype), pool(4, state_dtype)
    x[2][1] = float("nan")
    slots = torch.tensor([3, 9, -1, 9, 0])[::2]
    before, want_state = state.clone(), state.clone()
    got = kda_decode(*x, slots, state)
    want = decode_reference.kda_decode(*x, slots, want_state)
    KDA_DECODE.equality.check(got, want, "o")
    KDA_DECODE.equality.check(state, want_state, "state")
    assert not got[1].any()
    assert torch.equal(state[1:3], before[1:3])


@STATES
@pytest.mark.parametrize("cuts", [[7], [1, 6], [3, 1, 3]])
def test_prefill_of_any_split_is_as_many_decode_steps_bit_for_bit(state_dtype, cuts):
    x, other = token_inputs(sum(cuts), torch.bfloat16), token_inputs(2, torch.bfloat16)
    steps, split = torch.zeros(2, H, D, D, dtype=state_dtype), torch.zeros(2, H, D, D, dtype=state_dtype)
    want = [kda_decode(*(t[i : i + 1] for t in x), torch.tensor([1]), steps) for i in range(sum(cuts))]
    got, at = [], 0
    for count in cuts:
        both = [torch.cat([o, t[at : at + count]]) for o, t in zip(other, x, strict=True)]
        got.append(kda_prefill(*both, Segments.of([2, count]), torch.tensor([0, 1]), split)[2:])
        at += count
    assert torch.equal(torch.cat(got), torch.cat(want))
    assert torch.equal(split[1], steps[1])


def test_prefill_equals_the_chunk_form_and_skips_a_segment_without_a_slot():
    x, state = token_inputs(24), pool(3, torch.float32)
    x[2][5:8] = float("nan")
    segments, slots, want_state = Segments.of([5, 3, 16]), torch.tensor([2, -1, 0]), state.clone()
    got = kda_prefill(*x, segments, slots, state)
    KDA_PREFILL.equality.check(got, prefill_reference.kda_prefill(*x, segments, slots, want_state), "o")
    KDA_PREFILL.equality.check(state, want_state, "state")
    assert not got[5:8].any()


class FusedInputs:
    """Raw projections of B requests as slices of wide rows, weights and pools, and the chain of separate operations."""

    def __init__(self, requests: int, dtype: torch.dtype, state_dtype: torch.dtype, bound: float | None) -> None:
        width = H * D
        wide = torch.randn(requests, 6 * width + 8).to(dtype)
        self.rows = [wide[:, : 3 * width], wide[:, 3 * width : 4 * width], wide[:, -H:], wide[:, 4 * width : 5 * width]]
        self.weight, self.bias = torch.randn(3 * width, 4), torch.randn(width)
        self.a_log, self.norm, self.bound = torch.rand(H), torch.randn(D), bound
        self.history = torch.randn(requests + 2, 3, 3 * width).to(dtype)
        self.state = pool(requests + 2, state_dtype)

    def fused(self, slots: torch.Tensor, at: slice = slice(None)) -> torch.Tensor:
        qkv, forget, beta, gate = (t[at] for t in self.rows)
        shared = (self.bias, self.a_log, self.bound, self.norm, 1e-5)
        return kda_step(qkv, self.history, self.weight, forget, beta, gate, *shared, slots, self.state)

    def chain(self, slots: torch.Tensor) -> torch.Tensor:
        qkv, forget, beta, gate = self.rows
        shared = (self.bias, self.a_log, self.bound, self.norm, 1e-5)
        return step_reference.kda_step(qkv, self.history, self.weight, forget, beta, gate, *shared, slots, self.state)


@DTYPES
@STATES
@pytest.mark.parametrize("bound", [None, -5.0])
def test_fused_decode_step_equals_the_chain(dtype, state_dtype, bound):
    slots = torch.tensor([4, -1, 0])
    torch.manual_seed(5)
    one = FusedInputs(3, dtype, state_dtype, bound)
    torch.manual_seed(5)
    two = FusedInputs(3, dtype, state_dtype, bound)
    before = one.history.clone()
    got, want = one.fused(slots), two.chain(slots)
    KDA_STEP.equality.check(got, want, "y")
    KDA_STEP.equality.check(one.state, two.state, "state")
    assert torch.equal(one.history, two.history)
    assert torch.equal(one.history[1:4], before[1:4])
    assert not got[1].any()


def test_fused_decode_step_does_not_know_its_batch():
    torch.manual_seed(5)
    together, slots = FusedInputs(4, torch.bfloat16, torch.float32, -5.0), torch.tensor([5, 1, -1, 2])
    torch.manual_seed(5)
    alone = FusedInputs(4, torch.bfloat16, torch.float32, -5.0)
    want = together.fused(slots)
    got = torch.cat([alone.fused(slots[i : i + 1], slice(i, i + 1)) for i in range(4)])
    assert torch.equal(got, want)
    assert torch.equal(alone.state, together.state)
    assert torch.equal(alone.history, together.history)


@DTYPES
@pytest.mark.parametrize("lengths", [[9], [1, 1, 1, 1, 1], [1, 2, 7, 3, 1], [4, 0, 2]])
def test_conv_equals_the_reference(dtype, lengths):
    tokens, channels = sum(lengths), 300
    x = torch.randn(tokens, channels + 20).to(dtype)[:, 20:]
    weight, slots = torch.randn(channels, 4), torch.randperm(7)[: len(lengths)]
    history = torch.randn(7, 3, channels).to(dtype)
    want_history, segments = history.clone(), Segments.of(lengths)
    got = conv(x, segments, slots, history, weight)
    CONV.equality.check(got, conv_reference.conv(x, segments, slots, want_history, weight))
    assert torch.equal(history, want_history)


@pytest.mark.parametrize("lengths", [[2, 2, 2], [1, 1, 1]])
def test_conv_without_a_slot_is_zero_and_touches_nothing(lengths):
    x, weight, history = torch.randn(sum(lengths), 40), torch.randn(40, 4), torch.randn(3, 3, 40)
    dead = slice(lengths[0], lengths[0] + lengths[1])
    x[dead] = float("nan")
    before = history.clone()
    y = conv(x, Segments.of(lengths), torch.tensor([2, 9, -1, 9, 0])[::2], history, weight)
    assert not y[dead].any()
    assert y.isfinite().all()
    assert torch.equal(history[1], before[1])
    assert torch.equal(history[0], torch.cat([before[0], x[-lengths[2] :]])[-3:])


def test_conv_bits_do_not_know_how_a_sequence_was_cut():
    u, weight = torch.randn(9, 30), torch.randn(30, 4)
    whole = conv(u, Segments.of([9]), torch.tensor([0]), torch.zeros(1, 3, 30), weight)
    for cuts in ([1] * 9, [2, 5, 2]):
        history, at, parts = torch.zeros(2, 3, 30), 0, []
        for count in cuts:
            both = torch.cat([u[:1], u[at : at + count]])
            parts.append(conv(both, Segments.of([1, count]), torch.tensor([0, 1]), history, weight)[1:])
            at += count
        assert torch.equal(torch.cat(parts), whole), cuts


@pytest.mark.parametrize("slots", [[2, -1, 0], [-1, 1, 3], [-1, -1, -1]])
def test_adapter_of_fla_finds_and_keeps_the_right_states(slots, monkeypatch):
    """With our own chunk form in the package's place: what is passed, and where final states go."""

    def stand_in(q, k, v, g, beta, *, initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu):
        assert output_final_state
        assert state_v_first
        assert torch.equal(cu_seqlens, cu_seqlens_cpu)
        parts, final = Segments.of(cu_seqlens.diff().tolist()), initial_state.clone()
        every = torch.arange(len(parts))
        o = prefill_reference.kda_prefill(q[0], k[0], v[0], g[0], beta[0], parts, every, final)
        return o[None], final

    package = ModuleType("fla.ops.kda")
    package.chunk_kda = stand_in
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.ops", ModuleType("fla.ops"))
    monkeypatch.setitem(sys.modules, "fla.ops.kda", package)
    monkeypatch.delitem(sys.modules, "anabranch.ops.kda_prefill.fla", raising=False)
    adapter = import_module("anabranch.ops.kda_prefill.fla")
    x, state, parts = token_inputs(12), pool(4, torch.bfloat16), Segments.of([4, 3, 5])
    want_state = state.clone()
    want = prefill_reference.kda_prefill(*x, parts, torch.tensor(slots), want_state)
    KDA_PREFILL.equality.check(adapter.kda_prefill(*x, parts, torch.tensor(slots), state), want)
    assert torch.equal(state, want_state)


NOPE, ROPE, V, RANK, PAGE = 24, 16, 20, 32, 16
SPLIT = 4 * PAGE


def latent_inputs(heads: int, queries: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q as a slice of wide rows, pages of which the last is poisoned, kv_b."""
    wide = torch.randn(queries, 2 * heads * (NOPE + ROPE)).to(dtype)
    q = wide[:, : heads * (NOPE + ROPE)].unflatten(1, (heads, NOPE + ROPE))
    pages = torch.randn(21, PAGE, RANK + ROPE)
    pages[20] = float("nan")
    return q, pages.to(dtype), (torch.randn(heads, NOPE + V, RANK) * 0.2).to(dtype)


@DTYPES
@pytest.mark.parametrize("heads", [3, 20])
def test_latent_decode_equals_the_reference(dtype, heads):
    totals = torch.tensor([1, 150, 0, SPLIT, SPLIT + 1])
    q, pages, kv_b = latent_inputs(heads, len(totals), dtype)
    table = torch.stack([torch.randperm(20)[:10] for _ in totals])
    got = mla.mla_decode(q, totals, table, pages, kv_b)
    MLA_DECODE.equality.check(got, mla_reference.mla_decode(q, totals, table, pages, kv_b))
    assert not got[2].any()
    for i in (1, 3):
        assert torch.equal(mla.mla_decode(q[i : i + 1], totals[i : i + 1], table[i : i + 1], pages, kv_b)[0], got[i])


def test_rows_behind_the_newest_one_are_never_used():
    """They may hold anything, NaN included; a table may name any page for positions that do not exist yet."""
    q, pages, kv_b = latent_inputs(3, 1, torch.bfloat16)
    table, total = torch.tensor([[4, 7, 20, 20, 20]]), torch.tensor([PAGE + 3])
    want = mla.mla_decode(q, total, table[:, :2], pages, kv_b)
    pages[7, 3:] = float("nan")
    got = mla.mla_decode(q, total, table, pages, kv_b)
    assert got.isfinite().all()
    assert torch.equal(got, want)


@DTYPES
def test_latent_prefill_is_as_many_decode_steps_bit_for_bit(dtype, monkeypatch):
    n = SPLIT + 6
    q, pages, kv_b = latent_inputs(3, n, dtype)
    table, first = torch.randperm(20)[None, :6], n - 9  # the last nine tokens are new
    whole = mla.mla_prefill(q[first:], Segments.of([9], [n]), table, pages, kv_b)
    MLA_PREFILL.equality.check(whole, mla_reference.mla_prefill(q[first:], Segments.of([9], [n]), table, pages, kv_b))
    steps = [mla.mla_decode(q[i : i + 1], torch.tensor([i + 1]), table, pages, kv_b) for i in range(first, n)]
    assert torch.equal(torch.cat(steps), whole)
    monkeypatch.setattr(mla, "PARTIAL_BYTES", 1)
    both = Segments.of([2, 4], [2, first + 4])
    mixed = mla.mla_prefill(torch.cat([q[:2], q[first : first + 4]]), both, table.expand(2, -1), pages, kv_b)
    assert torch.equal(mixed[2:], whole[:4])


@DTYPES
def test_fused_attention_prefill_equals_the_reference(dtype):
    """sdpa.py runs on a CPU too: new sequences, one new token, and several behind a context."""
    lengths, totals = [5, 1, 7], [5, 40, 30]
    q, pages, kv_b = latent_inputs(3, sum(lengths), dtype)
    table, segments = torch.stack([torch.randperm(20)[:3] for _ in lengths]), Segments.of(lengths, totals)
    want = mla_reference.mla_prefill(q, segments, table, pages, kv_b)
    MLA_PREFILL.equality.check(sdpa.mla_prefill(q, segments, table, pages, kv_b), want)
