"""The chunked prefill on a real GPU at the shapes of the released models: errors, bits, graph replay."""

from functools import partial
from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.kda_prefill import error, exact_prompt, fresh, prompt_inputs, rows_of

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from anabranch.ops.kda_prefill import chunked, reference
from anabranch.ops.kda_prefill.chunked import Config
from anabranch.ops.kda_prefill.spec import EQUAL_KEY_ERRORS, KDA_PROMPT, RANDOM_ERRORS
from anabranch.ops.registry import IMPLEMENTATIONS

GATES = pytest.mark.parametrize("gate", ["bounded", "softplus"])
DEVICE = "cuda"


@pytest.fixture(params=["chunked", "mixed", "cuda"])
def impl(request) -> Any:
    """What has kda_prompt and its Prefill; "mixed" is the CUDA prepare with the Triton chain behind it."""
    name = "cuda" if request.param == "mixed" else request.param
    chosen = next(i for i in IMPLEMENTATIONS["kda_prefill"] if i.name == name)
    if not (verdict := chosen.verdict(None, torch.device(DEVICE), deterministic=False)).ok:
        pytest.skip(verdict.reason)
    module = import_module(f"anabranch.ops.kda_prefill.{name}")
    if request.param != "mixed":
        return module

    class Mixed(module.Prefill):
        def chain(self) -> None:
            chunked.Prefill.chain(self)

    return SimpleNamespace(Prefill=Mixed, kda_prompt=partial(chunked.prompt, Mixed))


@GATES
@pytest.mark.parametrize("near", [None, 1e-2])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 4097])
def test_errors_against_fp64(impl, gate, near, length):
    given = prompt_inputs([length], 12, gate, near=near, device=DEVICE)
    want, want_state = exact_prompt(given)
    got = impl.kda_prompt(**given)
    bounds = RANDOM_ERRORS if near is None else EQUAL_KEY_ERRORS
    errors = error(got, want), error(given["state"][given["slots"]], want_state)
    print(f"{gate} near={near} T={length}: output {errors[0]:.1e}, state {errors[1]:.1e}")
    assert errors[0] < bounds[0]
    assert errors[1] < bounds[1]


@GATES
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [12, 32, 96])
def test_ragged_batch(impl, gate, state_dtype, heads):
    """One segment has no slot and holds NaN, NaN lies behind the last token; each is as if it were alone."""
    lengths = [1, 65, 2, 640, 130, 63]
    given = prompt_inputs(lengths, heads, gate, padding=9, state_dtype=state_dtype, device=DEVICE)
    given["slots"][4] = -1
    before = fresh(given)
    for name in ("q", "k", "v", "forget"):
        given[name][708:838] = float("nan")
    got = impl.kda_prompt(**given)[: sum(lengths)]
    assert not got[708:838].any()
    want = fresh(before)
    KDA_PROMPT.equality.check(got, reference.kda_prompt(**want)[: sum(lengths)], "o")
    live = given["slots"][given["slots"] >= 0]
    assert error(given["state"][live], want["state"][live]) < RANDOM_ERRORS[1]
    idle = [s for s in range(len(given["state"])) if s not in live.tolist()]
    assert torch.equal(given["state"][idle], before["state"][idle])
    at = 0
    for length, slot in zip(lengths, given["slots"].tolist(), strict=True):
        if slot >= 0:
            alone = fresh(rows_of(before, at, at + length, slot))
            assert torch.equal(impl.kda_prompt(**alone), got[at : at + length])
            assert torch.equal(alone["state"][slot], given["state"][slot])
        at += length


@pytest.mark.parametrize(("heads", "lengths"), [(96, [16384]), (12, [1024] * 16), (32, [8192]), (12, [4097])])
@GATES
def test_full_shapes(impl, heads, lengths, gate):
    given = prompt_inputs(lengths, heads, gate, device=DEVICE)
    want = fresh(given)
    KDA_PROMPT.equality.check(impl.kda_prompt(**given), reference.kda_prompt(**want), "o")
    assert error(given["state"], want["state"]) < RANDOM_ERRORS[1]


@pytest.mark.parametrize("heads", [12, 32])
def test_cuts_at_chunk_ends_are_not_seen_in_the_bits(impl, heads):
    given = prompt_inputs([1000], heads, device=DEVICE)
    whole, slot = fresh(given), int(given["slots"][0])
    want = impl.kda_prompt(**whole)
    for cuts in ([0, 64, 1000], [0, 640, 704, 960, 1000], [*range(0, 1000, 64), 1000]):
        part = fresh(given)
        parts = [impl.kda_prompt(**rows_of(part, a, b, slot)) for a, b in pairwise(cuts)]
        assert torch.equal(torch.cat(parts), want)
        assert torch.equal(part["state"], whole["state"])
    odd = fresh(given)
    parts = [impl.kda_prompt(**rows_of(odd, a, b, slot)) for a, b in ((0, 1), (1, 333), (333, 1000))]
    KDA_PROMPT.equality.check(torch.cat(parts), want)
    assert error(odd["state"][slot], whole["state"][slot]) < RANDOM_ERRORS[1]


def test_states_are_saved_at_every_chunk_end(impl):
    given = prompt_inputs([300, 64, 7], 12, slots=12, device=DEVICE)
    given["slots"] = torch.tensor([4, 0, 1], device=DEVICE)
    given["saves"] = torch.tensor([7, 8, -1, 9, 10, 11, 2], device=DEVICE)
    before, want = given["state"].clone(), fresh(given)
    impl.kda_prompt(**given)
    reference.kda_prompt(**want)
    assert torch.equal(given["state"][[3, 5, 6]], before[[3, 5, 6]])
    for slot in (4, 0, 1, 7, 8, 9, 10, 11, 2):
        assert error(given["state"][slot], want["state"][slot]) < RANDOM_ERRORS[1], slot
    plain = fresh(rows_of(given | {"saves": None, "state": before}, 0, 256, 4))
    impl.kda_prompt(**plain)
    assert torch.equal(plain["state"][4], given["state"][9])


def test_every_launch_of_the_chain_has_the_same_bits(impl):
    given, want = prompt_inputs([300, 65], 12, device=DEVICE), None
    for config in (Config(), Config(stages=1), Config(stages=3), Config(rows=128, chain_warps=8)):
        own = fresh(given)
        o = chunked.prompt(impl.Prefill, **own, config=config)
        want = want or (o, own["state"])
        assert torch.equal(o, want[0]), config
        assert torch.equal(own["state"], want[1]), config


def test_heads_in_turns_give_the_same_bits(impl, monkeypatch):
    given = prompt_inputs([300, 65], 12, device=DEVICE)
    first, again = fresh(given), fresh(given)
    want = impl.kda_prompt(**first)
    monkeypatch.setattr(chunked, "SCRATCH", 1)
    monkeypatch.setattr(chunked, "SM_PAIRS", 10)
    assert len(chunked.turns(12, 128, given["segments"])) == 3
    assert torch.equal(impl.kda_prompt(**again), want)
    assert torch.equal(again["state"], first["state"])


def test_replay_with_changed_inputs(impl):
    """Fresh memory is poisoned inside the capture."""
    given = prompt_inputs([100, 64], 12, device=DEVICE)
    plain = fresh(given)
    impl.kda_prompt(**fresh(given))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = impl.kda_prompt(**given)
    for _ in range(3):
        given["q"].mul_(0.9)
        given["forget"].mul_(0.9)
        graph.replay()
        want = impl.kda_prompt(**given | {"state": plain["state"]})
        assert torch.equal(out, want)
        assert torch.equal(given["state"], plain["state"])


def test_many_launches_have_the_same_bits(impl):
    """A race would show sooner or later."""
    given = prompt_inputs([1024] * 4, 32, device=DEVICE)
    first = fresh(given)
    want = impl.kda_prompt(**first)
    for _ in range(20):
        again = fresh(given)
        assert torch.equal(impl.kda_prompt(**again), want)
        assert torch.equal(again["state"], first["state"])
