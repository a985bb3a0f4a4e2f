"""Continuous batching: whatever arrives when, every request answers as if it were alone, and nothing leaks."""

import random

import pytest
import torch
from helpers.oracle import engine_model
from helpers.ref_tiny import kimi_k3_tiny, kimi_linear_tiny, random_weights

from anabranch.engine.cache import Cache, CacheShape
from anabranch.engine.engine import Engine
from anabranch.engine.request import Request
from anabranch.engine.runner import Runner
from anabranch.engine.sampling import SamplingParams
from anabranch.engine.text import TextStream

KL = kimi_linear_tiny(layers=4, kda_layers=(1, 2, 3), full_layers=(4,))


@pytest.fixture(scope="module")
def model():
    return engine_model(KL, random_weights(KL, 1))


def make(
    model, slots: int = 3, pages: int = 6, chunk: int = 16, eos=(), snapshots: int = 0, ahead: bool = False
) -> Engine:
    shape = CacheShape.of(model.config, model.parallel, torch.float32)
    cache = Cache(model.config, model.parallel, shape, slots=slots, pages=pages, snapshots=snapshots, device="cpu")
    return Engine(Runner(model, cache), eos, 512, chunk, prefix_cache=snapshots > 0, ahead=ahead)


def request(number: int, prompt: list[int], **params) -> Request:
    values = {"temperature": 0.0, "max_tokens": 8} | params
    return Request(id=number, prompt=prompt, params=SamplingParams(**values), text=TextStream(None))


def answer(model, prompt: list[int], **params) -> list[int]:
    engine, r = make(model, slots=1), request(0, prompt, **params)
    engine.add(r)
    while engine.busy:
        engine.step()
    return r.output


@pytest.mark.parametrize("ahead", [False, True])
def test_random_arrivals_answer_as_if_alone(model, ahead):
    rng = random.Random(4)
    plans = [
        ([rng.randrange(KL.vocab) for _ in range(rng.choice((1, 2, 3, 17, 40, 65)))], rng.randrange(1, 12))
        for _ in range(14)
    ]
    engine = make(model, slots=3, pages=5, ahead=ahead)
    pending, done = list(enumerate(plans)), {}
    while pending or engine.busy:
        for _ in range(rng.randrange(3)):
            if pending:
                number, (prompt, count) = pending.pop(0)
                engine.add(request(number, prompt, max_tokens=count))
        if engine.busy:
            for r in engine.step():
                if r.finish_reason:
                    done[r.id] = r.output
    for number, (prompt, count) in enumerate(plans):
        assert done[number] == answer(model, prompt, max_tokens=count)
    assert len(engine.scheduler.slots) == 3
    assert len(engine.scheduler.pages) == 5


WISHES = {
    "greedy": {},
    "warm": {"temperature": 0.8, "seed": 5},
    "cut": {"temperature": 1.2, "top_p": 0.9, "top_k": 20, "seed": 6},
    "scored": {"logprobs": 3},
    "kept from ending": {"min_tokens": 6},
    "penalised": {"repetition_penalty": 1.7, "presence_penalty": 0.5},
    "biased": {"temperature": 0.7, "seed": 8, "logit_bias": {3: 2.0}},
    "prompt scored": {"prompt_logprobs": 2},
    "one token": {"max_tokens": 1},
}


@pytest.mark.parametrize("together", [False, True])
def test_launching_ahead_changes_no_sample(model, together):
    """Ends by a token, by length and by min_tokens; choices that need the tokens before them; prefix hits."""
    free = answer(model, [3, 1, 4], max_tokens=12)

    def run(ahead):
        engine = make(model, slots=9, pages=30, chunk=64, eos=(free[5],), snapshots=4, ahead=ahead)
        requests = []
        for i, params in enumerate(WISHES.values()):
            prompt = [3, 1, 4] if i % 2 else [(7 * k + 1) % KL.vocab for k in range(90)]
            requests.append(request(i, prompt, **{"max_tokens": 12} | params))
            engine.add(requests[-1])
            while engine.busy and not together:
                engine.step()
        while engine.busy:
            engine.step()
        return engine, requests

    (_, plain), (engine, ahead) = run(False), run(True)
    for name, one, other in zip(WISHES, plain, ahead, strict=True):
        assert one.output == other.output, name
        assert [list(s.top) for s in one.sampled] == [list(s.top) for s in other.sampled], name
        assert [s.logprob for s in one.sampled] == pytest.approx([s.logprob for s in other.sampled], rel=1e-4)
        assert (one.finish_reason, len(one.prompt_logprobs)) == (other.finish_reason, len(other.prompt_logprobs)), name
    assert {r.finish_reason for r in ahead} == {"length", "stop"}
    assert any(r.cached_tokens for r in ahead) or together
    assert len(engine.scheduler.slots) == 9


def test_a_step_is_launched_before_the_last_is_read(model):
    engine, r = make(model, ahead=True), request(0, [3, 1, 4], max_tokens=4)
    engine.add(r)
    seen = []
    while engine.busy:
        engine.step()
        seen.append((len(r.sampled), r.computed))
    # one more token is in the cache than a step at a time would have put there; nothing is launched past the last
    assert seen[:3] == [(1, 4), (2, 5), (3, 6)]
    assert r.finish_reason == "length"


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_prefill_chunks_do_not_change_the_answer(model, chunk):
    prompt = [(5 * i + 1) % KL.vocab for i in range(50)]
    engine, r = make(model, chunk=chunk), request(0, prompt)
    engine.add(r)
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
    assert r.output == answer(model, prompt)
    assert steps == -(-50 // chunk) + 7


def test_eos_ends_and_min_tokens_and_ignore_eos_override(model):
    prompt = [3, 1, 4]
    free = answer(model, prompt, max_tokens=8)
    eos = free[2]
    first = free.index(eos) + 1

    def run(**params):
        engine, r = make(model, eos=(eos,)), request(0, prompt, **params)
        engine.add(r)
        while engine.busy:
            engine.step()
        return r

    assert (run().output, run().finish_reason) == (free[:first], "stop")
    assert run(ignore_eos=True).output == free
    assert run(ignore_eos=True).finish_reason == "length"
    late = run(min_tokens=5)
    assert len(late.output) >= 5
    assert eos not in late.output[:5]


def test_abort_frees_at_once_and_leaves_others_alone(model):
    engine = make(model, slots=2, pages=4)
    requests = [request(i, [i + 1] * 20, max_tokens=20) for i in range(3)]
    for r in requests:
        engine.add(r)
    for _ in range(4):
        engine.step()
    engine.abort(requests[0])
    engine.abort(requests[2])
    assert requests[0].finish_reason == requests[2].finish_reason == "abort"
    while engine.busy:
        engine.step()
    assert requests[1].output == answer(model, requests[1].prompt, max_tokens=20)
    assert len(engine.scheduler.slots) == 2
    assert len(engine.scheduler.pages) == 4


def test_a_slot_used_before_starts_from_zeros(model):
    engine = make(model, slots=1)
    for prompt in ([9] * 30, [2, 7]):
        r = request(0, prompt)
        engine.add(r)
        while engine.busy:
            engine.step()
        assert r.output == answer(model, prompt)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt has no tokens"),
        ([1] * 600, {}, "exceeds the context of 512"),
        ([1] * 400, {}, "exceeds the 384 tokens of the cache"),
    ],
)
def test_requests_that_can_never_run_are_refused(model, prompt, params, message):
    with pytest.raises(ValueError, match=message):
        make(model).add(request(0, prompt, **params))


def test_pool_bytes_are_what_the_shape_says():
    k3 = engine_model(kimi_k3_tiny(), random_weights(kimi_k3_tiny(), 0))
    shape = CacheShape.of(k3.config, k3.parallel, torch.bfloat16, torch.bfloat16)
    cache = Cache(k3.config, k3.parallel, shape, slots=5, pages=3, device="cpu")
    assert cache.bytes == 5 * shape.bytes_per_slot + (3 + 1) * 64 * shape.bytes_per_token
