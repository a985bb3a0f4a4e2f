"""Whole jobs on CPUs, a process a rank: every layout answers as one rank does, busy or idle, warm or cold."""

import multiprocessing
import os
import signal
import time
from dataclasses import replace

import pytest

from anabranch import LLM, SamplingParams
from anabranch.engine import build
from anabranch.engine.messages import RankFailed
from anabranch.fusion import counters
from anabranch.models.tiny import init_checkpoint

OPTIONS = {"device": "cpu", "deterministic": True, "max_seqs": 3, "max_len": 256, "prefill_chunk": 64}
OPTIONS |= {"expert_load": True}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=4, temperature=1.0, seed=5, ignore_eos=True, logprobs=2, prompt_logprobs=1)
# more than the slots, of very different lengths: some wait, some replicas are idle at the end
PROMPTS = [[i + 3] * length for i, length in enumerate((1, 130, 62, 63, 61, 64, 3, 65))]
# half of them launch steps ahead, as GPUs do
LAYOUTS = {
    "kl": [{"tp": 2, "ahead": True}, {"tp": 4, "dp_attention": 4, "ep": 4, "ahead": True}, {"tp": 2, "pp": 2}],
    "k3": [{"tp": 4}, {"tp": 4, "dp_attention": 2, "ep": 2, "ahead": True}, {"pp": 2, "ahead": True}],
}
WISHES = [
    # goes on when those that wait for their history have ended
    SamplingParams(max_tokens=14, temperature=0.9, top_p=0.8, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=5, temperature=0.0, repetition_penalty=1.8, ignore_eos=True),
    SamplingParams(max_tokens=5, temperature=0.0, min_tokens=3, ignore_eos=True),
]
CASES = [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts]


def tokens(outputs) -> list[list[int]]:
    return [answer.token_ids for output in outputs for answer in output.outputs]


@pytest.fixture(scope="module", params=["kl", "k3"])
def checkpoint(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    init_checkpoint(request.param, path)
    one = LLM(path, **OPTIONS)
    wanted, load = one.generate(PROMPTS, GREEDY), one.expert_load()
    seeded = one.generate([[9] * 5], SEEDED)[0]
    newer = tmp_path_factory.mktemp(f"{request.param}-newer")
    init_checkpoint(request.param, newer, seed=1)
    one.update_weights(newer)
    return path, request.param, load, wanted, seeded, (newer, tokens(one.generate(PROMPTS[:3], GREEDY)))


def few_pages(monkeypatch) -> None:
    """This rank has room for few pages, and so all have: requests lose theirs and start again."""
    plan = build.plan_memory
    monkeypatch.setattr(build, "plan_memory", lambda *a, **k: replace(plan(*a, **k), pages=4))


@pytest.mark.parametrize("number", range(3))
def test_every_layout_answers_as_one_rank(checkpoint, number, monkeypatch):
    path, name, load, wanted, seeded, newer = checkpoint
    layout = LAYOUTS[name][number]
    if "pp" in layout:
        few_pages(monkeypatch)
    with LLM(path, **OPTIONS, **layout) as llm:
        replicas = llm.engine.replicas
        assert len(replicas) == layout.get("dp_attention", 1)
        outputs = llm.generate(PROMPTS, GREEDY)
        assert tokens(outputs) == tokens(wanted)
        for got, want in zip(outputs, wanted, strict=True):
            assert got.outputs[0].logprobs == pytest.approx(want.outputs[0].logprobs, abs=2e-3)
        if "pp" in layout:
            assert llm.engine.scheduler.preemptions
        else:  # every token is counted once, whoever computed it; idle rows and padding are not
            assert llm.expert_load() == load
        # every replica has worked, and all memory has been given back
        assert all(engine.generation_tokens for engine in replicas)
        assert all(len(engine.scheduler.slots) == OPTIONS["max_seqs"] for engine in replicas)
        # alone in the job, seeded, with scores: the other replicas compute for nobody
        got = llm.generate([[9] * 5], SEEDED)[0]
        assert tokens([got]) == tokens([seeded])
        assert [list(top) for top in got.outputs[0].top_logprobs] == [list(t) for t in seeded.outputs[0].top_logprobs]
        assert [p for p, _ in got.prompt_logprobs[1:]] == pytest.approx(
            [p for p, _ in seeded.prompt_logprobs[1:]], abs=2e-3
        )
        # a saved state is found again, on whichever replica it lies
        again = [llm.generate([PROMPTS[1]], GREEDY)[0] for _ in range(len(replicas) + 1)]
        assert {tuple(tokens([o])[0]) for o in again} == {tuple(tokens(wanted)[1])}
        assert max(o.cached_tokens for o in again) == 128
        # closing a stream frees its memory, also with steps under way
        stream = llm.stream([7, 8], SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True))
        while llm.engine.replicas[0].generation_tokens == 0:
            next(stream)
        stream.close()
        assert not any(engine.scheduler.running for engine in replicas)
        llm.update_weights(newer[0])
        assert tokens(llm.generate(PROMPTS[:3], GREEDY)) == newer[1] != tokens(wanted)[:3]
        facts = [llm.fleet.facts[rank] for rank in sorted(llm.fleet.facts)]
        assert [f["rank"] for f in facts] == list(range(1, llm.fleet.layout.world))
        assert {f["place"]["attn_tp_size"] for f in facts} == {llm.fleet.layout.attn_tp}
    assert not [p for p in multiprocessing.active_children() if p.name.startswith("anabranch-rank")]


def test_sums_that_may_vary_give_the_same_tokens(checkpoint):
    """Prompts go to their experts by all-to-all where that is less, and drawn tokens go from rank to rank."""
    path, name, _, wanted, *_ = checkpoint
    options = {**OPTIONS, "deterministic": False}
    want = tokens(LLM(path, **options).generate([[9] * 5] * len(WISHES), WISHES))
    layout = {"tp": 2, "dp_attention": 2, "ep": 2} if name == "kl" else {"tp": 2}
    with LLM(path, **options, **layout, ahead=True) as llm, counters.counting() as ran:
        # one replica has a prompt, the other one row
        got = [llm.generate([prompt], GREEDY)[0] for prompt in PROMPTS[1:3]]
        assert tokens(got) == tokens(wanted)[1:3]
        assert tokens(llm.generate([[9] * 5] * len(WISHES), WISHES)) == want
    assert (ran["moe.all_to_all"] > 0) == (name == "kl")


def test_a_killed_rank_ends_the_job_with_its_name(checkpoint):
    path, *_ = checkpoint
    with LLM(path, **OPTIONS, tp=2) as llm:
        [rank] = [p for p in multiprocessing.active_children() if p.name == "anabranch-rank-1"]
        stream = llm.stream([1], SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
        next(stream)
        os.kill(rank.pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(RankFailed, match=r"^rank 1 (was ended by SIGKILL|has gone)"):
            list(stream)
        assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 3}, "is not divisible by attention-TP"),
        ({"tp": 2, "dp_attention": 4}, "dp_attention=4 does not divide tp=2"),
        ({"pp": 99}, "pp=99: the model has"),
        ({"tp": 2, "device": "cuda:1"}, "device='cuda:1': with several ranks accepted are auto, cpu, cuda"),
        ({"rank_timeout": 0}, "rank_timeout=0: need a positive number of seconds"),
    ],
)
def test_what_cannot_start_is_refused_before_any_rank(checkpoint, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        LLM(checkpoint[0], **{**OPTIONS, **options})
    assert "\n" not in str(caught.value)


def test_what_a_rank_refuses_is_the_users_one_line(checkpoint):
    with pytest.raises(ValueError, match=r"max_seqs=3 of .* do not fit into"):
        LLM(checkpoint[0], **OPTIONS, tp=2, memory_fraction=1e-9)
    assert not [p for p in multiprocessing.active_children() if p.name.startswith("anabranch-rank")]
