"""The chunked prefill in Triton's interpreter: errors against fp64, ragged batches, cuts, saved states, NaN."""

import pytest
import torch
from helpers.kda_prefill import error, exact_prompt, fresh, prompt_inputs, rows_of
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from anabranch.ops.kda_prefill import chunked, reference
from anabranch.ops.kda_prefill.spec import EQUAL_KEY_ERRORS, KDA_PREFILL, KDA_PROMPT, RANDOM_ERRORS
from anabranch.ops.segments import Segments

GATES = pytest.mark.parametrize("gate", ["bounded", "softplus"])


@GATES
@pytest.mark.parametrize("near", [None, 1e-2])
def test_errors_against_fp64(gate, near):
    """Outputs are rounded to bf16 besides."""
    given = prompt_inputs([201], 2, gate, near=near)
    want, want_state = exact_prompt(given)
    got = chunked.kda_prompt(**given)
    bounds = RANDOM_ERRORS if near is None else EQUAL_KEY_ERRORS
    assert error(got, want) < bounds[0]
    assert error(given["state"][given["slots"]], want_state) < bounds[1]


def test_a_gate_that_forgets_all_at_once_leaves_no_trace():
    """softplus far beyond what fp32 can express as a decay, and a gate that keeps all, side by side."""
    given = prompt_inputs([130], 1, "softplus")
    given["forget"][::3], given["forget"][1::3] = 300.0, -30.0
    given["a_log"].fill_(3.0)
    want, want_state = exact_prompt(given)
    assert error(chunked.kda_prompt(**given), want) < RANDOM_ERRORS[0]
    assert error(given["state"][given["slots"]], want_state) < RANDOM_ERRORS[1]


@GATES
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_ragged_batch(gate, state_dtype):
    """Segments of any length, one without a slot that holds NaN, padding that holds NaN; each as if it were alone."""
    lengths = [1, 65, 0, 2, 64, 130, 63]
    given = prompt_inputs(lengths, 2, gate, dim=64, padding=5, state_dtype=state_dtype)
    given["slots"][4] = -1
    before = fresh(given)
    for name in ("q", "k", "v", "forget"):
        given[name][68:132] = float("nan")
    got = chunked.kda_prompt(**given)[: sum(lengths)]
    assert not got[68:132].any()
    want = fresh(before)
    KDA_PROMPT.equality.check(got, reference.kda_prompt(**want)[: sum(lengths)], "o")
    live = given["slots"][given["slots"] >= 0]
    assert error(given["state"][live], want["state"][live]) < RANDOM_ERRORS[1]
    idle = [s for s in range(len(given["state"])) if s not in live.tolist()]
    assert torch.equal(given["state"][idle], before["state"][idle])
    at = 0
    for length, slot in zip(lengths, given["slots"].tolist(), strict=True):
        if slot >= 0 and length:
            alone = fresh(rows_of(before, at, at + length, slot))
            assert torch.equal(chunked.kda_prompt(**alone), got[at : at + length])
            assert torch.equal(alone["state"][slot], given["state"][slot])
        at += length


def test_more_segments_than_are_looked_at_together():
    lengths = [1, 2, 70] * 13
    given = prompt_inputs(lengths, 1, dim=64)
    want = fresh(given)
    KDA_PROMPT.equality.check(chunked.kda_prompt(**given), reference.kda_prompt(**want), "o")
    assert error(given["state"], want["state"]) < RANDOM_ERRORS[1]


@settings(max_examples=5, deadline=None)
@drawn(cuts=st.lists(st.sampled_from([64, 128, 192]), max_size=2), rest=st.integers(1, 70), odd=st.integers(1, 63))
def test_cuts_at_chunk_ends_are_not_seen_in_the_bits(cuts, rest, odd):
    """A cut elsewhere stays within the class."""
    total = sum(cuts) + rest
    given = prompt_inputs([total], 1, dim=64, seed=total)
    whole, slot, at, parts = fresh(given), int(given["slots"][0]), 0, []
    want, elsewhere = chunked.kda_prompt(**whole), fresh(given)
    for length in (*cuts, rest):
        parts.append(chunked.kda_prompt(**rows_of(given, at, at + length, slot)))
        at += length
    assert torch.equal(torch.cat(parts), want)
    assert torch.equal(given["state"], whole["state"])
    if odd < total:
        parts = [chunked.kda_prompt(**rows_of(elsewhere, *part, slot)) for part in ((0, odd), (odd, total))]
        KDA_PROMPT.equality.check(torch.cat(parts), want)
        assert error(elsewhere["state"][slot], whole["state"][slot]) < RANDOM_ERRORS[1]


def test_states_are_saved_at_the_chunk_ends_that_are_asked_for():
    lengths = [130, 64, 5]
    given = prompt_inputs(lengths, 2, dim=64, slots=9)
    given["slots"] = torch.tensor([4, 0, -1])
    given["saves"] = torch.tensor([7, -1, 3, 2, 8, 8])[:5]
    want, before = fresh(given), given["state"].clone()
    plain = fresh(given) | {"saves": None}
    got = chunked.kda_prompt(**given)
    KDA_PROMPT.equality.check(got, reference.kda_prompt(**want), "o")
    assert torch.equal(got, chunked.kda_prompt(**plain))
    for slot in (4, 0, 7, 3, 2):
        assert error(given["state"][slot], want["state"][slot]) < RANDOM_ERRORS[1], slot
    assert torch.equal(given["state"][3], given["state"][4])
    assert torch.equal(given["state"][[1, 5, 6, 8]], before[[1, 5, 6, 8]])
    chunk = fresh(rows_of(plain | {"state": before}, 0, 64, 4))
    chunked.kda_prompt(**chunk)
    assert torch.equal(chunk["state"][4], given["state"][7])


def test_the_form_that_is_given_norms_and_gates_saves_too():
    from anabranch.ops.arithmetic import sigmoid
    from anabranch.ops.kda_gate.reference import log_decay
    from anabranch.ops.norm.reference import l2_norm

    given = prompt_inputs([130, 64], 2, dim=64, slots=9)
    slots, state, own = given["slots"], given["state"], given["state"].clone()
    idle = [s for s in range(9) if s not in slots.tolist()]
    gate = log_decay(given["forget"], given["dt_bias"], given["a_log"], given["lower_bound"])
    rows = (l2_norm(given["q"]), l2_norm(given["k"]), given["v"], gate, sigmoid(given["beta_logits"].float()))
    saves = torch.tensor([-1, idle[0], -1, idle[1]])
    got = chunked.kda_prefill(*rows, given["segments"], slots, state, saves)
    assert torch.equal(got, chunked.kda_prefill(*rows, given["segments"], slots, own))
    assert torch.equal(state[slots], own[slots])
    assert torch.equal(state[idle[1]], state[slots[1]])
    want = given["state"].clone()
    reference.kda_prefill(*rows, given["segments"], slots, want, saves)
    assert error(state[idle[0]], want[idle[0]]) < RANDOM_ERRORS[1]
    assert torch.equal(state[idle[2:]], own[idle[2:]])


@pytest.mark.parametrize(
    ("heads", "lengths", "most"),
    [
        (12, [16384], [12]),
        (32, [16384], [32]),
        (96, [16384], [96]),  # 1.6 GB
        (96, [32768], [48, 48]),  # 66 heads would be more than 2 GiB, but fewer would not fill the device
        (96, [1024] * 64, [24, 24, 24, 24]),
        (32, [16383, 1], [32]),
        (32, [1] * 100, [32]),  # small whatever its shape
        (32, [65] * 252, [16, 16]),  # half empty chunks: no more than the tokens of a full batch take
    ],
)
def test_heads_take_turns_where_scratch_memory_would_grow(heads, lengths, most):
    parts = chunked.turns(heads, 128, Segments.of(lengths))
    assert [p.stop - p.start for p in parts] == most
    assert [p.start for p in parts] == [0, *(p.stop for p in parts[:-1])]
    assert parts[-1].stop == heads


@pytest.mark.parametrize("dim", [64, 128])
def test_heads_in_turns_give_the_same_bits(dim, monkeypatch):
    given = prompt_inputs([70, 3], 3, dim=dim, slots=9)
    given["saves"] = torch.tensor([7, -1, 8])
    turns, want = fresh(given), fresh(given)
    o = chunked.kda_prompt(**want)
    monkeypatch.setattr(chunked, "SCRATCH", 1)
    monkeypatch.setattr(chunked, "SM_PAIRS", 1)
    assert len(chunked.turns(3, dim, given["segments"])) == 3
    assert torch.equal(chunked.kda_prompt(**turns), o)
    assert torch.equal(turns["state"], want["state"])


def test_the_plain_contract_takes_gates_and_strengths_as_they_are():
    given = prompt_inputs([70, 3], 2, dim=64)
    q, k = (torch.nn.functional.normalize(given[name].float(), dim=-1) for name in "qk")
    g, beta = -5 * torch.rand(q.shape), torch.rand(q.shape[:2])
    state, want = given["state"].clone(), given["state"].clone()
    rest = (Segments.of([70, 3]), given["slots"])
    got = chunked.kda_prefill(q, k, given["v"], g, beta, *rest, state)
    KDA_PREFILL.equality.check(got, reference.kda_prefill(q, k, given["v"], g, beta, *rest, want), "o")
    assert error(state, want) < RANDOM_ERRORS[1]
