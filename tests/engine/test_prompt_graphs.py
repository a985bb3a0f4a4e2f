"""Padded prompts as a graph replays them, run eagerly on a CPU: same logits, same cache, nothing else touched."""

from dataclasses import replace

import pytest
import torch
from helpers.oracle import engine_model
from helpers.ref_tiny import kimi_k3_tiny, kimi_linear_tiny, random_weights

from anabranch.engine.cache import PAGE, Cache, CacheShape
from anabranch.engine.engine import Engine
from anabranch.engine.prompt_graphs import SIZES, PromptGraphs, why_not
from anabranch.engine.request import Request
from anabranch.engine.runner import Runner
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
        segments = Segments.of([count, size - count], [count, 0])
        if count == size:  # a kernel skips an empty segment, reference operations never see one
            return replace(batch, segments=Segments.of([count]), slots=batch.slots[:1])
        return replace(batch, segments=segments)

    def run(self, request, count, size):
        return self._forward(self.true_batch(request, count, size))


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


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("case", TINY)
@pytest.mark.parametrize(
    ("count", "pages", "depth"),
    [(100, [7, 3], 64), (100, [7, 3], 0), (1, [5], 0), (128, [9, 1], 0), (192, [2, 11, 4], 0), (191, [2, 11, 4], 128)],
)
def test_a_padded_prompt_is_the_prompt(case, count, pages, depth):
    model, request = model_of(case), ask(count)
    request.pages, request.prefill_until = pages, count
    request.saving = (depth, 3) if depth else None
    saved = [2, 3] if depth else [2]
    eager, padded = new_cache(model), new_cache(model)
    for layer in padded.layers:  # nobody else's memory is read, the padding page included
        others = [i for i in range(13) if i not in pages]
        if isinstance(layer, KdaState):
            for pool in (layer.conv, layer.state):
                pool[[0, 1, 3]] = torch.nan
        else:
            layer.pages[others] = torch.nan
    batch, _ = Runner(model, eager)._batch([(request, count)])
    graphs = Played(model, padded, [192])
    with torch.inference_mode():
        want, got = model(batch, eager.layers), model(graphs.true_batch(request, count, 192), padded.layers)
    assert (got - want).abs().max() < 1e-9
    for old, new in zip(eager.layers, padded.layers, strict=True):
        if isinstance(old, KdaState):
            for one, other in ((old.conv, new.conv), (old.state, new.state)):
                assert torch.allclose(one[saved], other[saved], atol=1e-9)
                assert other[[i for i in range(4) if i not in saved]].isnan().all()
        else:
            assert torch.allclose(old.pages[pages], new.pages[pages], atol=1e-9)
            assert new.pages[[i for i in range(12) if i not in pages]].isnan().all()


def test_the_room_of_a_capture_holds_every_cut():
    graphs = PromptGraphs(model_of("kimi-linear"), new_cache(model_of("kimi-linear")), [64, 256])
    for size in graphs.sizes:
        batch = graphs.batch(graphs.host(size), size)
        assert sum(batch.segments.lengths) == size
        assert batch.slots.tolist() == [-1, -1]
        assert batch.rows.tolist() == [-1] * size
        room = chunks_of(batch.segments)
        assert batch.saves.chunks.tolist() == [-1] * room
        assert batch.saves.slots.tolist() == [-1]
        assert all(chunks_of(Segments.of([n, size - n])) <= room for n in range(1, size + 1))
    assert all(size % PAGE == 0 for size in SIZES)
    with pytest.raises(ValueError, match="multiples of 64"):
        PromptGraphs(graphs.model, graphs.cache, [64, 100])


def test_which_steps_a_graph_takes():
    graphs = PromptGraphs(model_of("kimi-linear"), new_cache(model_of("kimi-linear")), [64, 128])
    request, long, scored = ask(100), ask(200), ask(9, prompt_logprobs=1)
    for r in (request, long, scored):
        r.prefill_until = len(r.prompt)
    assert graphs.size([(request, 64)]) == 64
    assert graphs.size([(request, 65)]) == 128
    assert graphs.size([(long, 128)]) == 128, "the beginning of a prompt"
    assert graphs.size([(long, 129)]) is None
    assert graphs.size([(scored, 9)]) is None
    assert graphs.size([(request, 100), (long, 20)]) is None
    assert graphs.size([]) is None
    request.computed = 64
    assert graphs.size([(request, 36)]) is None, "what stands before it is not in the graph"
    assert "kda_prefill=reference" in (why_not(graphs.model) or "")


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
            runner.prompts = Played(model, cache, [64, 128])
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
