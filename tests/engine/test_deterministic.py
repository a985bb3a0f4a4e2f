"""Deterministic mode: one prompt gives the same tokens and log probabilities whatever happens around it."""

import random

import pytest
import torch
from helpers.oracle import model_config
from helpers.ref_tiny import kimi_k3_tiny, kimi_linear_tiny, random_weights

from anabranch.config.fusion import FusionConfig
from anabranch.engine.cache import Cache, CacheShape
from anabranch.engine.engine import Engine
from anabranch.engine.request import Request
from anabranch.engine.runner import Runner
from anabranch.engine.sampling import SamplingParams
from anabranch.engine.text import TextStream
from anabranch.models.kimi import KimiForCausalLM

TINY = {
    "kimi-linear": kimi_linear_tiny(layers=4, kda_layers=(1, 2, 3), full_layers=(4,)),
    "kimi-k3": kimi_k3_tiny(layers=5, kda_layers=(1, 2, 3), full_layers=(4, 5)),
}
PROMPT = [(17 * i + 5) % 96 for i in range(150)]
ANSWER = 24


def build(tiny, fusion: FusionConfig | None = None) -> KimiForCausalLM:
    model = KimiForCausalLM(model_config(tiny), deterministic=True, fusion=fusion)
    weights = random_weights(tiny, 3)
    model.load_state_dict({n: t.flatten()[: tiny.kda_heads] if n.endswith("A_log") else t for n, t in weights.items()})
    return model


@pytest.fixture(scope="module", params=TINY)
def model(request):
    return build(TINY[request.param])


def make(model, *, slots=33, pages=120, chunk=2048, snapshots=0) -> Engine:
    shape = CacheShape.of(model.config, model.parallel, torch.float32)
    cache = Cache(model.config, model.parallel, shape, slots=slots, pages=pages, snapshots=snapshots, device="cpu")
    return Engine(Runner(model, cache), (), 1024, chunk, prefix_cache=snapshots > 0)


def ask(prompt=PROMPT, number=0, **params) -> Request:
    values = {"temperature": 0.0, "max_tokens": ANSWER, "logprobs": 3} | params
    return Request(id=number, prompt=list(prompt), params=SamplingParams(**values), text=TextStream(None))


def run(engine: Engine, *requests: Request) -> list[Request]:
    for r in requests:
        engine.add(r)
    while engine.busy:
        engine.step()
    return list(requests)


def others(count: int, rng: random.Random) -> list[Request]:
    return [
        ask([rng.randrange(96) for _ in range(rng.randrange(1, 90))], i + 1, max_tokens=rng.randrange(1, 20))
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def alone(model):
    return run(make(model), ask())[0].sampled


def test_in_a_batch_of_32_random_others(model, alone):
    crowd = others(32, random.Random(1))
    mine = ask()
    run(make(model), *crowd[:15], mine, *crowd[15:])
    assert mine.sampled == alone


@pytest.mark.parametrize("chunk", [1, 37, 64, 100, 128])
def test_at_every_chunk_size(model, alone, chunk):
    mine = ask()
    run(make(model, chunk=chunk), *others(2, random.Random(2)), mine)
    assert mine.sampled == alone


@pytest.mark.parametrize("after", [1, 3, 12])
def test_after_preemption_in_prefill_and_in_decode(model, alone, after):
    """One page short: the older request grows and takes the newer one's memory at some step of its life."""
    mine = ask()
    engine = make(model, chunk=64)
    engine.add(mine)
    for _ in range(after):
        engine.step()
    where = "decode" if mine.sampled else "prefill"
    engine.scheduler._preempt(mine)
    run(engine)
    assert mine.preemptions == 1, where
    assert mine.sampled == alone


def test_preemption_by_lack_of_pages(model, alone):
    mine, older = ask(number=1), ask([3] * 120, 0, max_tokens=80)
    engine = make(model, pages=5, slots=2)
    run(engine, older, mine)
    assert mine.preemptions > 0
    assert mine.sampled == alone
    assert older.sampled == run(make(model), ask([3] * 120, 0, max_tokens=80))[0].sampled


def test_with_a_warm_prefix_cache(model, alone):
    engine = make(model, snapshots=8)
    cold, warm, longer = ask(), ask(number=1), ask([*PROMPT, 1, 2, 3], 2)
    run(engine, cold)
    run(engine, warm)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 128)
    assert cold.sampled == warm.sampled == alone
    run(engine, longer)
    assert longer.cached_tokens == 128
    assert longer.sampled == run(make(model), ask([*PROMPT, 1, 2, 3]))[0].sampled


def test_second_turn_reuses_the_answer(model):
    engine = make(model, snapshots=8)
    first = run(engine, ask(max_tokens=80))[0]
    turn = PROMPT + first.output + [7, 7]
    second = run(engine, ask(turn, 1))[0]
    assert second.cached_tokens == 192  # 150 prompt tokens and 80 answered ones hold three whole pages
    assert second.sampled == run(make(model), ask(turn))[0].sampled


def test_every_fused_path_gives_the_same_bits(model, alone):
    name = "kimi-k3" if model.config.is_k3 else "kimi-linear"
    for kda in ("separate", "split", "whole", "overlap"):
        for mla in ("separate", "merged", "overlap") if model.config.is_k3 else ("separate",):
            fused = build(TINY[name], FusionConfig(kda=kda, mla=mla))
            assert run(make(fused), ask())[0].sampled == alone, (kda, mla)


def test_sampling_by_seed_does_not_depend_on_the_batch(model):
    def sampled(*crowd):
        mine = ask(temperature=0.9, top_p=0.9, seed=11)
        run(make(model), *crowd, mine)
        return mine.sampled

    assert sampled() == sampled(*others(9, random.Random(5)))


def test_long_answer_with_and_without_fusion():
    """The kind of run that a public MLA gate merge failed: many tokens, compared bit for bit."""
    tiny = kimi_k3_tiny(layers=3, kda_layers=(1, 2), full_layers=(3,), experts=4, topk=2)
    answers = []
    paths = (("separate", "separate"), ("whole", "merged"), ("overlap", "overlap"))
    for fusion in (FusionConfig(kda=kda, mla=mla) for kda, mla in paths):
        mine = [ask([i + 1, 2, 3], i, max_tokens=300) for i in range(3)]
        run(make(build(tiny, fusion)), *mine)
        answers.append([m.sampled for m in mine])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_poisoned_slot_ends_its_own_request_only(model, alone, value):
    engine = make(model, slots=3, snapshots=4)
    mine, sick, later = ask(), ask([9] * 70, 1, max_tokens=60), ask(number=2)
    engine.add(mine)
    engine.add(sick)
    while len(sick.sampled) < 5:
        engine.step()
    slot = sick.slot
    engine.runner.cache.layers[1].state[slot, 0, 0, 0] = value
    run(engine)
    assert (sick.finish_reason, len(sick.sampled)) == ("error", 5)
    assert "non-finite" in sick.error
    assert engine.nonfinite == 1
    assert bool(engine.runner.cache.finite(slot))
    engine.scheduler.prefix.flush()
    run(engine, later)
    assert mine.sampled == later.sampled == alone


def test_prompt_logprobs_equal_those_of_the_answer(model):
    """Scoring prompt + answer in one pass gives the log probabilities that the answer was sampled with."""
    whole = run(make(model), ask())[0]
    scored = ask(PROMPT + whole.output, max_tokens=0, prompt_logprobs=2)
    run(make(model, chunk=50, snapshots=4), scored)
    assert len(scored.prompt_logprobs) == len(PROMPT) + ANSWER
    assert scored.prompt_logprobs[0] == (None, {})
    assert [p for p, _ in scored.prompt_logprobs[len(PROMPT) :]] == [s.logprob for s in whole.sampled]
    assert (scored.finish_reason, scored.output) == ("length", [])
