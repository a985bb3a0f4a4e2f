"""A prompt leaves its state at the last page end on the way: one step, and the memory of a prompt that ends there."""

import pytest
import torch
from helpers.memory_machine import CONFIG
from helpers.oracle import engine_model
from helpers.ref_tiny import kimi_k3_tiny, kimi_linear_tiny, random_weights
from helpers.toy import POISON, answer, check_memory, toy_engine, toy_request
from helpers.toy_job import check_ranks, toy_job

from anabranch.engine.cache import Cache, CacheShape
from anabranch.engine.engine import Engine
from anabranch.engine.request import Request
from anabranch.engine.runner import Runner
from anabranch.engine.sampling import SamplingParams
from anabranch.engine.text import TextStream
from anabranch.layers.batch import KdaState, Saves
from anabranch.parallel.layout import Layout

TINY = {"kl": kimi_linear_tiny(layers=4, kda_layers=(1, 2, 3), full_layers=(4,)), "k3": kimi_k3_tiny()}


def make(model, chunk: int = 2048, snapshots: int = 3) -> Engine:
    dtype = torch.get_default_dtype()
    shape = CacheShape.of(model.config, model.parallel, dtype, dtype)
    cache = Cache(model.config, model.parallel, shape, slots=3, pages=40, snapshots=snapshots, device="cpu")
    for layer in cache.layers:
        for pool in (layer.conv, layer.state) if isinstance(layer, KdaState) else ():
            pool[3:] = torch.nan  # snapshot slots
    return Engine(Runner(model, cache), (), 2048, chunk, prefix_cache=snapshots > 0)


def ask(count: int, seed: int = 0, head: int = 0, **params) -> Request:
    """`count` tokens, the first `head` of which all seeds share."""
    prompt = [(31 * i + i // 7) % 96 for i in range(head)] + [(17 * i + 5 + seed) % 96 for i in range(head, count)]
    values = {"temperature": 0.0, "max_tokens": 4} | params
    return Request(id=seed, prompt=prompt, params=SamplingParams(**values), text=TextStream(None))


def run(engine: Engine, *requests: Request) -> list[int]:
    """Tokens of each prompt step, while the requests are answered together."""
    steps, launch = [], engine.runner.launch

    def counted(segments, *args):
        steps.extend(count for request, count in segments if not request.decoding)
        return launch(segments, *args)

    engine.runner.launch = counted
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()
        check_memory(engine)
    engine.runner.launch = launch
    return steps


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("case", TINY)
def test_a_thousand_tokens_are_one_step_and_what_they_leave_is_reused(case):
    model = engine_model(TINY[case], random_weights(TINY[case], 3))
    engine, ending, cold = make(model), make(model), make(model, snapshots=0)
    first, second, alone = (ask(1000, seed, head=960) for seed in (1, 2, 2))
    assert run(engine, first) == [1000]
    assert run(ending, ask(960, 3, head=960)) == [960]
    states = []
    for one in (engine, ending):
        [node] = [n for n in one.scheduler.prefix._nodes() if n.snapshot is not None]
        assert node.depth == 960
        kda = [layer for layer in one.runner.cache.layers if isinstance(layer, KdaState)]
        states.append([pool[node.snapshot] for layer in kda for pool in (layer.conv, layer.state)])
    for got, want in zip(*states, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert run(engine, second) == [40]
    assert (second.cached_tokens, run(cold, alone)) == (960, [1000])
    assert second.output == alone.output
    assert [s.logprob for s in second.sampled] == pytest.approx([s.logprob for s in alone.sampled], abs=1e-9)


@pytest.mark.parametrize("ops", [{}, {"kda_step": "chain"}])
def test_several_prompts_beside_an_answer_leave_theirs(ops):
    """Answers come first in a batch; without an operation of their own they take those of prompts, in one call."""
    model = engine_model(TINY["kl"], random_weights(TINY["kl"], 3), ops=ops)
    engine, speaker = make(model, snapshots=4), ask(3, 9, max_tokens=30)
    engine.add(speaker)
    engine.step()
    assert run(engine, ask(150, 1, head=150), ask(100, 2)) == [150, 100]
    depths = {n.depth for n in engine.scheduler.prefix._nodes() if n.snapshot is not None}
    assert depths == {64, 128}
    for request, cached in ((ask(170, 3, head=150), 128), (ask(80, 2), 64)):
        run(engine, request)
        assert request.cached_tokens == cached
        cold = ask(len(request.prompt), request.id, head=150 if request.id == 3 else 0)
        run(make(model, snapshots=0), cold)
        assert request.output == cold.output


@pytest.mark.parametrize(
    ("options", "chunk", "params", "steps"),
    [
        ({}, 2048, {}, [130]),
        ({"deterministic": True}, 2048, {}, [128, 2]),
        ({"ops": {"kda_prefill": "deterministic"}}, 2048, {}, [128, 2]),
        ({}, 100, {}, [64, 66]),
        ({}, 50, {}, [50, 14, 50, 14, 2]),  # the delta rule counts its chunks from where a step starts
        ({}, 2048, {"prompt_logprobs": 0}, [130]),  # nothing of it is reused
    ],
)
def test_where_prompts_are_cut(options, chunk, params, steps):
    engine = make(engine_model(TINY["kl"], random_weights(TINY["kl"], 3), **options), chunk)
    assert run(engine, ask(130, **params)) == steps
    again = ask(130)
    assert run(engine, again) == ([2] if not params else [130])
    assert again.cached_tokens == (0 if params else 128)


def test_marks_where_no_chunk_ends_are_refused():
    with pytest.raises(ValueError, match="a state after 65 of 100 tokens: need a positive multiple of 64"):
        Saves.of([100], [(65, 3)], "cpu")
    with pytest.raises(ValueError, match="a state after 128 of 100 tokens"):
        Saves.of([100], [(128, 3)], "cpu")
    assert Saves.of([100, 3], [None, None], "cpu") is None
    saves = Saves.of([100, 3, 64], [(64, 5), None, (64, 7)], "cpu")
    assert saves is not None
    assert (saves.chunks.tolist(), saves.slots.tolist(), saves.ends.tolist()) == ([5, -1, -1, 7], [5, 7], [64, 167])


@pytest.mark.parametrize("ahead", [False, True])
def test_a_slot_comes_back_from_a_step_that_failed_or_was_poisoned_or_aborted(ahead):
    engine = toy_engine(CONFIG, slots=2, pages=9, snapshots=2, ahead=ahead, saves=True)
    launch = engine.runner.launch

    def fail(*_):
        raise RuntimeError("no")

    request, engine.runner.launch = toy_request(0, [3] * 90, 5), fail
    engine.add(request)
    with pytest.raises(RuntimeError):
        engine.step()
    assert request.saving is not None
    check_memory(engine)
    engine.abort(request)
    check_memory(engine)
    assert len(engine.scheduler.prefix.snapshots) == 2
    engine.runner.launch = launch
    poisoned, aborted = toy_request(1, [3] * 89 + [POISON], 5), toy_request(2, [4] * 90, 5)
    engine.add(poisoned)
    engine.step()
    assert (poisoned.finish_reason, len(engine.scheduler.prefix.snapshots)) == ("error", 2)
    engine.add(aborted)
    engine._flight = engine._launch(None)
    assert [saved.depth for saved in aborted.saved] == [64]
    engine.abort(aborted)
    while engine.busy:
        engine.step()
    check_memory(engine)
    assert len(engine.scheduler.prefix.snapshots) == 2
    assert engine.runner.model.left == 2


def test_what_is_scheduled_and_thrown_away_takes_no_slot():
    engine = toy_engine(CONFIG, slots=2, pages=9, snapshots=2, saves=True)
    request = toy_request(0, [3] * 90, 5)
    engine.add(request)
    for _ in range(3):
        assert engine.scheduler.schedule() == [(request, 90)]
        check_memory(engine)
    assert len(engine.scheduler.prefix.snapshots) == 2


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, dp_attention=2), Layout(pp=2)], ids=str)
@pytest.mark.parametrize("ahead", [False, True])
def test_every_rank_leaves_the_state(layout, ahead):
    engine = toy_job(CONFIG, layout, slots=2, pages=9, snapshots=2, ahead=ahead, saves=True)
    requests = [toy_request(i, [7] * 64 + [i] * 20, 4) for i in range(4)]
    for first in range(0, 4, layout.dp_attention):
        for request in requests[first : first + layout.dp_attention]:  # one for each replica
            engine.add(request)
        while engine.busy:
            engine.step()
    assert [r.output for r in requests] == [answer(r.prompt, 4) for r in requests]
    assert sum(r.cached_tokens for r in requests) == 64 * (4 - layout.dp_attention)
    check_ranks(engine)
    runners = [engine.runner, *(f.runner for _, f in engine.fleet.hub._followers.values())]
    assert [runner.model.left for runner in runners] == [1] * layout.world
