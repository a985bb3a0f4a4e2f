"""Padded prompts, and what is left of them, as a graph replays them, run eagerly on a CPU: same logits, same cache."""

from dataclasses import replace

import pytest
import torch
from helpers.oracle import engine_model
from helpers.ref_tiny import kimi_k3_tiny, kimi_linear_tiny, random_weights
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.engine import build
from anabranch.engine.build import EngineOptions, prompt_sizes
from anabranch.engine.cache import PAGE, Cache, CacheShape, pages_for
from anabranch.engine.engine import Engine
from anabranch.engine.graphs import pick
from anabranch.engine.orders import Scribe, Shadows
from anabranch.engine.prompt_graphs import PAIRS, SINGLE, SIZES, PromptGraphs, why_not
from anabranch.engine.request import Request
from anabranch.engine.runner import Runner, Turn
from anabranch.engine.sampling import SamplingParams
from anabranch.engine.text import TextStream
from anabranch.layers.batch import Batch, KdaState
from anabranch.models.kimi import KimiForCausalLM
from anabranch.ops.kda_prefill.chunked import chunks_of
from anabranch.ops.segments import Segments

TINY = {"kimi-linear": kimi_linear_tiny(), "kimi-k3": kimi_k3_tiny()}


class Played(PromptGraphs):
    """A replay is an eager pass whose host lengths are the true ones, since reference operations read those."""

    def true_batch(self, request: Request, count: int, size: int) -> Batch:
        batch = self.batch(self.host(size, request, count), size)
        assert batch.segments.offsets.tolist() == [0, count, size]
        assert (batch.saves is None) == (not self.cache.snapshots)
        assert (batch.sees is None) == (size > SINGLE)
        segments = Segments.of([count, size - count], [request.computed + count, 0])
        assert batch.segments.ends.tolist() == list(segments.totals)
        if count == size:  # a kernel skips an empty segment, reference operations never see one
            return replace(batch, segments=Segments.of([count]), slots=batch.slots[:1])
        return replace(batch, segments=segments)

    def run(self, request, count, size):
        return self._forward(self.true_batch(request, count, size))


class Idle(PromptGraphs):
    """Replays for nobody, as eager passes."""

    def run(self, request, count, size):
        assert (request, count) == (None, 0)
        batch = self.batch(self.host(size), size)
        assert batch.slots.tolist() == [-1, -1]
        assert set(batch.rows.tolist()) == {-1}
        segments = Segments.of([size], [0])
        return self._forward(replace(batch, segments=segments, slots=batch.slots[:1], counts=None))


def model_of(case: str) -> KimiForCausalLM:
    return engine_model(TINY[case], random_weights(TINY[case], 3))


def new_cache(model: KimiForCausalLM) -> Cache:
    shape = CacheShape.of(model.config, model.parallel, torch.float64, torch.float64)
    return Cache(model.config, model.parallel, shape, slots=3, snapshots=1, pages=12, device="cpu")


def ask(count: int, number: int = 0, **params) -> Request:
    prompt = [(17 * i + 5 + number) % 96 for i in range(count)]
    return Request(
        id=number, prompt=prompt, params=SamplingParams(temperature=0.0, **params), text=TextStream(None), slot=2
    )


def hold_to_eager(model: KimiForCausalLM, history: int, rest: int, size: int, pages: list[int], depth: int = 0) -> None:
    """Logits and cache of `rest` tokens behind `history` others; the state after `depth` tokens goes to slot 3."""
    request = ask(history + rest)
    request.pages, request.prefill_until = pages[: pages_for(history + rest)], history + rest
    eager, padded = new_cache(model), new_cache(model)
    with torch.inference_mode():
        for cache in (eager, padded) if history else ():
            model(Runner(model, cache)._batch([(request, history)])[0], cache.layers)
    request.computed, request.saving = history, (depth, 3) if depth else None
    mine, saved = request.pages, [2, 3] if depth else [2]
    for layer in padded.layers:  # nobody else's memory is read, the padding page and what lies ahead included
        if isinstance(layer, KdaState):
            for pool in (layer.conv, layer.state):
                pool[[0, 1, 3]] = torch.nan
        else:
            layer.pages[[i for i in range(13) if i not in mine]] = torch.nan
            if size <= SINGLE:
                layer.pages[mine[-1], (history + rest - 1) % PAGE + 1 :] = torch.nan
    batch, _ = Runner(model, eager)._batch([(request, rest)])
    with torch.inference_mode():
        want = model(batch, eager.layers)
        got = model(Played(model, padded, [size], 768).true_batch(request, rest, size), padded.layers)
    assert (got - want).abs().max() < 1e-9
    for old, new in zip(eager.layers, padded.layers, strict=True):
        if isinstance(old, KdaState):
            for one, other in ((old.conv, new.conv), (old.state, new.state)):
                assert torch.allclose(one[saved], other[saved], atol=1e-9)
                assert other[[i for i in range(4) if i not in saved]].isnan().all()
        else:
            rows = [layer.pages[mine].flatten(0, 1)[: history + rest] for layer in (old, new)]
            assert torch.allclose(*rows, atol=1e-9)
            assert new.pages[[i for i in range(12) if i not in mine]].isnan().all()


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("case", TINY)
@pytest.mark.parametrize("size", [192, 320])
@pytest.mark.parametrize(
    ("count", "pages", "depth"),
    [(100, [7, 3], 64), (100, [7, 3], 0), (1, [5], 0), (128, [9, 1], 0), (192, [2, 11, 4], 0), (191, [2, 11, 4], 128)],
)
def test_a_padded_prompt_is_the_prompt(case, size, count, pages, depth):
    hold_to_eager(model_of(case), 0, count, size, pages, depth)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("case", TINY)
@pytest.mark.parametrize("history", [64, 256, 100])
@pytest.mark.parametrize(("rest", "size"), [(1, 16), (63, 64), (64, 64), (65, 128), (200, 256)])
def test_what_is_left_of_a_prompt_goes_on_from_its_history(case, history, rest, size):
    """A state is saved at the last page end on the way, if whole chunks lead there."""
    depth = (history + rest - 1) // PAGE * PAGE if history % PAGE == 0 and rest > PAGE else 0
    hold_to_eager(model_of(case), history, rest, size, [7, 3, 0, 11, 5, 8, 2, 10], depth)


@pytest.mark.usefixtures("double_precision")
@settings(max_examples=12, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(TINY)), st.integers(0, 300), st.integers(1, 256), st.randoms(use_true_random=False))
def test_any_rest_behind_any_history(case, history, rest, rng):
    size = rng.choice([s for s in SIZES if rest <= s <= SINGLE])
    marks = range(history + PAGE, history + rest, PAGE) if history % PAGE == 0 else ()
    hold_to_eager(model_of(case), history, rest, size, rng.sample(range(12), 9), rng.choice([0, *marks]))


def test_the_room_of_a_capture_holds_every_cut():
    graphs = PromptGraphs(model_of("kimi-linear"), new_cache(model_of("kimi-linear")), [16, 64, 256, 320], 500)
    for size in graphs.sizes:
        batch = graphs.batch(graphs.host(size), size)
        assert sum(batch.segments.lengths) == size
        assert batch.slots.tolist() == [-1, -1]
        assert batch.rows.tolist() == [-1] * size
        room = chunks_of(batch.segments)
        assert batch.saves.chunks.tolist() == [-1] * room
        assert batch.saves.slots.tolist() == [-1]
        assert all(chunks_of(Segments.of([n, size - n])) <= room for n in range(1, size + 1))
        if size <= SINGLE:
            assert batch.single[1].tolist() == [0] * size
            assert batch.block_table.shape == (size, 8), "the longest sequence"
        else:
            assert batch.block_table.shape == (1, size // PAGE)
    for sizes in ([64, 100], [0], [], [400]):
        with pytest.raises(ValueError, match="multiples of 16, of 64 above 256"):
            PromptGraphs(graphs.model, graphs.cache, sizes, 500)


def test_padding_is_equal_where_it_sees_nothing():
    graphs = PromptGraphs(model_of("kimi-linear"), new_cache(model_of("kimi-linear")), SIZES, 1024)
    request = ask(300)
    request.pages, request.prefill_until = list(range(5)), 300
    alone, square = graphs.batch(graphs.host(128, request, 100), 128), graphs.batch(graphs.host(384, request, 300), 384)
    assert alone.tokens[100:].tolist() == [request.prompt[99]] * 28
    assert square.tokens[300:].tolist() == request.prompt[:84]


def test_which_steps_a_graph_takes():
    graphs = PromptGraphs(model_of("kimi-linear"), new_cache(model_of("kimi-linear")), [64, 128, 320], 1 << 20)
    request, long, scored = ask(100), ask(400), ask(9, prompt_logprobs=1)
    for r in (request, long, scored):
        r.prefill_until = len(r.prompt)
    assert graphs.size([[(request, 64)]]) == 64
    assert graphs.size([[(request, 65)]]) == 128
    assert graphs.size([[(long, 320)]]) == 320, "the beginning of a prompt"
    assert graphs.size([[(long, 321)]]) is None
    assert graphs.size([[(scored, 9)]]) is None
    assert graphs.size([[(request, 100), (long, 20)]]) is None
    assert graphs.size([[]]) is None
    request.computed = long.computed = 64
    assert graphs.size([[(request, 36)]]) == 64
    assert graphs.size([[(long, 128)]]) == 128, "the middle of a prompt"
    assert graphs.size([[(long, 129)]]) is None, "a square knows no history"
    long.computed, long.prefill_until = PAIRS // 128 - 128, PAIRS
    assert graphs.size([[(long, 128)]]) == 128
    long.computed += 1
    assert graphs.size([[(long, 128)]]) is None, "reading all of it would take longer than launching"
    assert graphs.size([[(long, 64)]]) == 64
    request.computed = 100
    assert graphs.size([[(request, 1)]]) is None, "a decode step"
    for size in SIZES:
        assert "kda_prefill=reference" in (why_not(graphs.model, size) or "")


def test_replicas_replay_one_size_together():
    graphs = PromptGraphs(model_of("kimi-linear"), new_cache(model_of("kimi-linear")), [64, 128, 320], 512)
    fresh, other, rest, answer = ask(300), ask(60), ask(100), ask(20)
    for request in (fresh, other, rest, answer):
        request.prefill_until = len(request.prompt)
    rest.computed, answer.computed = 64, 20
    assert graphs.size([[(other, 60)], []]) == 64, "an idle replica computes tokens of nobody"
    assert graphs.size([[], [(fresh, 300)], [(other, 60)]]) == 320
    assert graphs.size([[], [(other, 60)], []]) is None, "too many would compute for nobody"
    assert graphs.size([[(rest, 36)], [(other, 60)]]) == 64
    assert graphs.size([[(rest, 36)], [(fresh, 300)]]) is None, "a square knows no history"
    assert graphs.size([[(answer, 1)], [(other, 60)]]) is None, "a decode step beside it"
    assert graphs.size([[], []]) is None
    runner = Runner(graphs.model, graphs.cache)
    runner.prompts = graphs
    assert runner.turn([[(other, 60)], []]) == Turn((64, 64), prompt=64)
    assert runner.turn([[(answer, 1)], [(other, 60)]]) == Turn((1, 60), eager="no graphs")


@pytest.mark.usefixtures("double_precision")
def test_a_replica_without_a_prompt_computes_tokens_of_nobody():
    graphs = Idle(model_of("kimi-linear"), cache := new_cache(model_of("kimi-linear")), [64], 512)
    runner = Runner(graphs.model, cache)
    runner.prompts = graphs
    before = [
        pool.clone() for layer in cache.layers if isinstance(layer, KdaState) for pool in (layer.conv, layer.state)
    ]
    flight = runner.launch([], turn=Turn((64, 64), prompt=64))
    assert (flight.segments, flight.ready, flight.wait()) == ([], [], [])
    assert runner.prompt_replays == {64: 1}
    after = [pool for layer in cache.layers if isinstance(layer, KdaState) for pool in (layer.conv, layer.state)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_stage_that_hands_on_chooses_nothing():
    """As replays of decode steps and prompts do."""
    model = model_of("kimi-linear")
    tokens, logprobs = pick(model, torch.empty(0, 96, dtype=torch.bfloat16), 90)
    assert (tokens.shape, tokens.dtype) == (logprobs.shape, torch.int64)
    assert logprobs.dtype == torch.float32
    [token], _ = pick(model, torch.arange(96.0)[None], 90)
    assert token == 89, "ids that are padding are not chosen"


def test_sizes_are_those_that_a_step_may_have(monkeypatch):
    model, options = model_of("kimi-linear"), EngineOptions(prefill_chunk=384)
    assert prompt_sizes(model, options, 4096) == []
    monkeypatch.setattr(build, "why_not", lambda model, size: None if size <= SINGLE else "no square here")
    assert prompt_sizes(model, options, 4096) == [16, 64, 128, 256]
    assert prompt_sizes(model, options, 100) == [16, 64]
    assert prompt_sizes(model, replace(options, eager=True), 4096) == []


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_answers_are_those_of_eager_steps(prefix_cache, monkeypatch):
    model, tokens = model_of("kimi-linear"), []
    for captured, saves in ((False, False), (False, True), (True, True)):
        monkeypatch.setattr(Runner, "saves", saves)
        shape = CacheShape.of(model.config, model.parallel, model.dtype)
        snapshots = 3 if prefix_cache else 0
        cache = Cache(model.config, model.parallel, shape, slots=4, pages=12, snapshots=snapshots, device="cpu")
        runner = Runner(model, cache)
        if captured:
            runner.prompts = Played(model, cache, [64, 128], 256)
        engine = Engine(runner, (), 256, 256, prefix_cache=prefix_cache)
        requests = [ask(n, i, max_tokens=4) for i, n in enumerate((100, 64, 3, 150))]
        for request in requests:
            request.slot = -1
            engine.add(request)
            engine.step()  # so that each prompt begins beside running answers or alone
        alone = [ask(n, i + 9, max_tokens=3) for i, n in enumerate((90, 128))]
        while engine.busy:
            engine.step()
        for request in alone:
            request.slot = -1
            engine.add(request)
            while engine.busy:
                engine.step()
        tokens.append([r.output for r in requests + alone])
        assert bool(sum(runner.prompt_replays.values()) >= 3) == captured
    assert tokens[0] == tokens[1] == tokens[2]
    assert all(tokens[0])


@pytest.mark.parametrize("captured", [False, True])
def test_the_turns_of_a_chat_are_replayed_behind_their_prefix(captured, monkeypatch):
    """Replays of each size, and the answers of an engine without graphs or prefix cache."""
    monkeypatch.setattr(Runner, "saves", True)
    model = model_of("kimi-linear")

    def engine(snapshots: int, chunk: int) -> Engine:
        shape = CacheShape.of(model.config, model.parallel, model.dtype)
        cache = Cache(model.config, model.parallel, shape, slots=4, pages=24, snapshots=snapshots, device="cpu")
        return Engine(Runner(model, cache), (), 512, chunk, prefix_cache=bool(snapshots))

    warm, cold = engine(4, 192), engine(0, 512)
    if captured:
        warm.runner.prompts = Played(model, warm.runner.cache, [16, 64, 192, 320], 512)
    chat, found, replays = [], [], []
    for number, said in enumerate((100, 70, 9, 230)):
        turn = chat + ask(said, number).prompt
        answers = []
        for one in (warm, cold):
            request = ask(0, number, max_tokens=5)
            request.prompt, request.slot = turn, -1
            one.add(request)
            while one.busy:
                one.step()
            answers.append(request.output)
        assert answers[0] == answers[1]
        found.append(warm.scheduler.prefix_hits)
        replays.append(dict(warm.runner.prompt_replays))
        chat = turn + answers[0]
    # turns of 100, 175, 189 and 424 tokens; the third answer passes a page end; the last turn is cut into 192 and 40
    assert found == [0, 64, 64 + 128, 64 + 128 + 192]
    assert replays == ([{192: 1}, {192: 2}, {192: 2, 64: 1}, {192: 3, 64: 2}] if captured else [{}] * 4)


def test_a_rank_that_follows_fills_in_the_same_fields():
    """A prompt's beginning and its rest, pages and saves told in orders as of tensor parallelism."""
    graphs = PromptGraphs(model_of("kimi-linear"), new_cache(model_of("kimi-linear")), [64, 128], 768)
    scribe, shadows, request = Scribe(), Shadows(), ask(210)
    request.prefill_until = 210
    for computed, count, pages, saving in ((0, 128, [7, 3], None), (128, 82, [7, 3, 9, 1], (192, 3))):
        request.computed, request.pages, request.saving = computed, pages, saving
        size = graphs.size([[(request, count)]])
        assert size == 128
        [(shadow, told)] = shadows.obey(scribe.step([(request, count)], None))
        assert told == count
        fields = graphs.host(size, request, count)
        assert torch.equal(graphs.host(size, shadow, told), fields)
        assert (fields == 3).any() or saving is None
