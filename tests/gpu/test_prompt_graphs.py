"""Captured prompts on a Hopper GPU, at the head sizes of Kimi-Linear: logits and cache of eager steps, any length.

And any history: what is left of a prompt behind a cached prefix or earlier chunks.
"""

from dataclasses import replace
from statistics import median

import pytest
import torch

from anabranch.engine.cache import PAGE, Cache, CacheShape
from anabranch.engine.prompt_graphs import SINGLE, PromptGraphs, why_not
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
    if why := why_not(made, 64) or why_not(made, 384):
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


def near(got: torch.Tensor, want: torch.Tensor, what: str, most: float = 5e-2) -> float:
    """The relative error. Other tiles of the library's products may be chosen for a padded size; `FLIP` below."""
    assert got.isfinite().all(), what
    error = ((got.double() - want.double()).norm() / want.double().norm()).item()
    assert error < most, f"{what}: {error:.3f}"
    return error


def begin(model: KimiForCausalLM, cache: Cache, request: Request, count: int) -> None:
    """The first `count` tokens of a request, eagerly."""
    if count:
        model(Runner(model, cache)._batch([(request, count)])[0], cache.layers)


def poison(cache: Cache, request: Request, count: int, size: int) -> None:
    """NaN wherever a replay of `count` tokens has nothing to read."""
    for layer in cache.layers:
        if isinstance(layer, KdaState):
            layer.state[3] = layer.conv[3] = torch.nan
            continue
        layer.pages[[i for i in range(PAGES + 1) if i not in request.pages]] = torch.nan
        if size <= SINGLE and (inside := (request.computed + count) % PAGE):
            layer.pages[request.pages[-1], inside:] = torch.nan


FLIP = 0.2  # behind the first choice of experts, where a last bit may choose another one and move a whole row
CASES = (
    *((0, count) for count in (1, 63, 64, 65, 100, 128, 300, 384, 17)),
    *((64, 1), (960, 16), (640, 63), (640, 64), (128, 65), (640, 100), (1000, 200), (1216, 200), (1280, 256)),
)


def test_replays_equal_eager_steps(model):
    """Where whole chunks lead to a page end on the way, the state there is left in slot 3."""
    sizes = (16, 64, 128, 256, 384)
    graphs = PromptGraphs(model, new_cache(model, poisoned=True), sizes, PAGES * PAGE)
    graphs.capture()
    errors = []
    for seed, (history, count) in enumerate(CASES):
        total, size, what = history + count, next(s for s in sizes if s >= count), f"{count} behind {history} tokens"
        request, eager = ask(total, 2, seed), new_cache(model)
        depth = (total - 1) // PAGE * PAGE
        depth = depth if depth > history and history % PAGE == 0 else 0
        idle = [0, 1] if depth else [0, 1, 3]
        graphs.cache.clear(request.slot, request.pages)
        with torch.inference_mode():
            for cache in (eager, graphs.cache):
                begin(model, cache, request, history)
            request.computed, request.saving = history, (depth, 3) if depth else None
            poison(graphs.cache, request, count, size)
            batch, _ = Runner(model, eager)._batch([(request, count)])
            want = model(batch, eager.layers)
            if depth:
                ending, ends = new_cache(model), ask(total, 2, seed)
                ends.prefill_until = depth
                begin(model, ending, ends, depth)
            got, picked = graphs.run(request, count, size)
        errors.append(near(got, want, f"logits of {what}", FLIP))
        assert picked[0].item() == got.argmax(-1).item()
        for i, (old, new) in enumerate(zip(eager.layers, graphs.cache.layers, strict=True)):
            most = FLIP if i > 1 else 5e-2
            if isinstance(old, KdaState):
                for name in ("state", "conv"):
                    left, mine = getattr(old, name), getattr(new, name)
                    near(mine[2], left[2], f"{name} {i} of {what}", most)
                    assert mine[idle].isnan().all()
                    if depth:
                        want_left, saved = getattr(ending.layers[i], name)[2], most if i else 1e-2
                        near(left[3], want_left, f"{name} {i} after {depth} of {what}", saved)
                        near(mine[3], want_left, f"{name} {i} after {depth} of {what}, replayed", saved)
            else:
                rows = [layer.pages[request.pages].flatten(0, 1)[history:total] for layer in (old, new)]
                near(rows[1], rows[0], f"latent rows of {what}", most)
                others = [i for i in range(PAGES) if i not in request.pages]
                assert new.pages[others].isnan().all()
    print(f"logits, relative errors: {[round(error, 4) for error in errors]}")
    assert median(errors) < 3e-2, "few prompts can have met a flip"


def test_a_runner_replays_prompts_that_are_alone(model):
    cache = new_cache(model)
    runner = Runner(model, cache)
    runner.prompts = PromptGraphs(model, cache, [128], PAGES * PAGE)
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


def test_a_prompt_in_two_steps_is_two_replays(model):
    cache, other = new_cache(model), new_cache(model)
    runner, plain = Runner(model, cache), Runner(model, other)
    runner.prompts = PromptGraphs(model, cache, [64, 128], PAGES * PAGE)
    runner.prompts.capture()
    samples = []
    for one in (runner, plain):
        request = ask(180, 0, 1)
        assert one.launch([(request, 128)]).wait()[0].sampled is None
        request.computed = 128
        flight = one.launch([(request, 52)])
        flight.seal(cache.device)
        samples.append(flight.wait()[0].sampled)
    assert runner.prompt_replays == {128: 1, 64: 1}
    assert not runner.eager_steps
    assert samples[0].logprob == pytest.approx(samples[1].logprob, abs=0.05)
