"""Captured prompts on a Hopper GPU, at the head sizes of Kimi-Linear: logits and cache of eager steps, any length."""

from dataclasses import replace

import pytest
import torch

from anabranch.engine.cache import PAGE, Cache, CacheShape
from anabranch.engine.prompt_graphs import PromptGraphs, why_not
from anabranch.engine.request import Request
from anabranch.engine.runner import Runner
from anabranch.engine.sampling import SamplingParams
from anabranch.engine.text import TextStream
from anabranch.layers.batch import KdaState
from anabranch.models.dummy import load_dummy
from anabranch.models.kimi import KimiForCausalLM

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

PAGES = 24


@pytest.fixture(scope="module")
def model(real_kl) -> KimiForCausalLM:
    moe = replace(real_kl.moe, experts=64)
    shape = {"layer_kinds": ("kda", "mla", "kda", "kda"), "moe_layers": (False, True, True, True)}
    made = KimiForCausalLM(replace(real_kl, vocab_size=4096, moe=moe, **shape), dtype=torch.bfloat16, device="cuda")
    if why := why_not(made):
        pytest.skip(why)
    load_dummy(made)
    return made


def new_cache(model: KimiForCausalLM, poisoned: bool = False) -> Cache:
    shape = CacheShape.of(model.config, model.parallel, model.dtype)
    cache = Cache(model.config, model.parallel, shape, slots=3, snapshots=1, pages=PAGES, device="cuda")
    for layer in cache.layers if poisoned else ():
        for pool in (layer.conv, layer.state) if isinstance(layer, KdaState) else ():
            pool[[0, 1, 3]] = torch.nan
        if not isinstance(layer, KdaState):
            layer.pages[:] = torch.nan
    return cache


def ask(count: int, slot: int, seed: int) -> Request:
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, 4096, (count,), generator=generator).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=2)
    request = Request(id=seed, prompt=prompt, params=params, text=TextStream(None), slot=slot, prefill_until=count)
    request.pages = torch.randperm(PAGES, generator=generator).tolist()[: -(-count // PAGE)]
    return request


def near(got: torch.Tensor, want: torch.Tensor, what: str, most: float = 5e-2) -> None:
    """Other tiles of the library's products may be chosen for a padded size, and an expert flip on a last bit."""
    assert got.isfinite().all(), what
    assert (got.double() - want.double()).norm() < most * want.double().norm(), what


def test_replays_equal_eager_steps(model):
    """Every prompt longer than a page also leaves its state at the last page end on its way, in slot 3."""
    graphs = PromptGraphs(model, new_cache(model, poisoned=True), [64, 128, 384])
    graphs.capture()
    for seed, count in enumerate((1, 63, 64, 65, 100, 128, 300, 384, 17)):
        request, eager = ask(count, 2, seed), new_cache(model)
        depth = (count - 1) // PAGE * PAGE
        request.saving, idle = ((depth, 3), [0, 1]) if depth else (None, [0, 1, 3])
        graphs.cache.clear(request.slot, request.pages)
        for layer in graphs.cache.layers:
            if isinstance(layer, KdaState):
                layer.state[3] = layer.conv[3] = torch.nan
            else:
                layer.pages[[i for i in range(PAGES + 1) if i not in request.pages]] = torch.nan
        with torch.inference_mode():
            batch, _ = Runner(model, eager)._batch([(request, count)])
            want = model(batch, eager.layers)
            if depth:
                ending, ends = new_cache(model), ask(count, 2, seed)
                ends.prompt, ends.prefill_until = ends.prompt[:depth], depth
                model(Runner(model, ending)._batch([(ends, depth)])[0], ending.layers)
            got, picked = graphs.run(request, count, next(s for s in (64, 128, 384) if s >= count))
        near(got, want, f"logits of {count} tokens")
        assert picked[0].item() == got.argmax(-1).item()
        for i, (old, new) in enumerate(zip(eager.layers, graphs.cache.layers, strict=True)):
            if isinstance(old, KdaState):
                if depth:
                    most = 1e-2 if i == 0 else 0.15  # no choice of experts before layer 0; one flip moves a whole row
                    for name in ("state", "conv"):
                        left, want_left = (getattr(cache.layers[i], name) for cache in (eager, ending))
                        near(left[3], want_left[2], f"{name} after {depth} of {count} tokens", most)
                        replayed = f"{name} after {depth} of {count} tokens, replayed"
                        near(getattr(new, name)[3], want_left[2], replayed, most)
                near(new.state[2], old.state[2], f"state of {count} tokens")
                near(new.conv[2], old.conv[2], f"conv rows of {count} tokens")
                assert new.state[idle].isnan().all()
                assert new.conv[idle].isnan().all()
            else:
                rows = [old.pages[request.pages], new.pages[request.pages]]
                near(rows[1].flatten(0, 1)[:count], rows[0].flatten(0, 1)[:count], f"latent rows of {count} tokens")
                others = [i for i in range(PAGES) if i not in request.pages]
                assert new.pages[others].isnan().all()


def test_a_runner_replays_prompts_that_are_alone(model):
    cache = new_cache(model)
    runner = Runner(model, cache)
    runner.prompts = PromptGraphs(model, cache, [128])
    runner.prompts.capture()
    first, twin, second = ask(100, 0, 1), ask(100, 0, 1), ask(120, 1, 2)
    alone = runner.launch([(first, 100)])
    alone.seal(cache.device)
    assert runner.prompt_replays == {128: 1}
    # a request that has a sample in flight is not sampled again: the eager twin is another one
    plain = Runner(model, other := new_cache(model)).launch([(twin, 100)])
    plain.seal(other.device)
    [replayed], [eager] = alone.wait(), plain.wait()
    assert replayed.sampled is not None
    assert eager.sampled is not None
    assert replayed.sampled.logprob == pytest.approx(eager.sampled.logprob, abs=0.05)
    both = runner.launch([(first, 100), (second, 120)])
    both.seal(cache.device)
    both.wait()
    assert runner.prompt_replays == {128: 1}
    assert runner.eager_steps["no graphs"] == 1
