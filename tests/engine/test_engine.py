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


def make(model, slots: int = 3, pages: int = 6, chunk: int = 16, eos=(), snapshots: int = 0) -> Engine:
    shape = CacheShape.of(model.config, model.parallel, torch.float32)
    cache = Cache(model.config, model.parallel, shape, slots=slots, pages=pages, snapshots=snapshots, device="cpu")
    return Engine(Runner(model, cache), eos, 512, chunk, prefix_cache=snapshots > 0)


def request(number: int, prompt: list[int], **params) -> Request:
    values = {"temperature": 0.0, "max_tokens": 8} | params
    return Request(id=number, prompt=prompt, params=SamplingParams(**values), text=TextStream(None))


def answer(model, prompt: list[int], **params) -> list[int]:
    engine, r = make(model, slots=1), request(0, prompt, **params)
    engine.add(r)
    while engine.busy:
        engine.step()
    return r.output


def test_random_arrivals_answer_as_if_alone(model):
    rng = random.Random(4)
    plans = [
        ([rng.randrange(KL.vocab) for _ in range(rng.choice((1, 2, 3, 17, 40, 65)))], rng.randrange(1, 12))
        for _ in range(14)
    ]
    engine = make(model, slots=3, pages=5)
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
