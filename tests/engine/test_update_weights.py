"""`LLM.update_weights`: every path then answers as a fresh model, bit for bit, and nothing stale is reused."""

import pytest
import torch
from helpers.checkpoints import read

from anabranch import LLM, FusionConfig, SamplingParams
from anabranch.models.tiny import init_checkpoint

GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, logprobs=2)
PROMPTS = ["new weights, old prompt " * 6, "short"]  # the first fills pages that the prefix cache keeps
KIND = {"kl": False, "k3": False, "kl-fp8": True, "k3-fp8": True}


@pytest.fixture(scope="module", params=KIND)
def checkpoints(request, tmp_path_factory):
    """(architecture, directory of the old weights, of the new ones, the new tensors)."""
    old, new = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")
    for seed, path in enumerate((old, new)):
        init_checkpoint(request.param[:2], path, seed=seed, fp8=KIND[request.param])
    return request.param, old, new, read(new)


def llm(path, **kw) -> LLM:
    return LLM(path, max_seqs=4, max_len=512, deterministic=True, **kw)


def answers(of: LLM) -> list:
    outputs = of.generate(PROMPTS, GREEDY)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.outputs[0].top_logprobs) for o in outputs]


def paths(case: str) -> list[FusionConfig]:
    if case.endswith("fp8"):
        return [FusionConfig(kda=p) for p in ("separate", "split", "overlap", "single")]
    mla = {
        "whole": "merged",
        "split": "separate",
        "overlap": "overlap",
        "fused": "merged",
        "single": "single",
        "separate": "separate",
    }
    return [FusionConfig(kda=k, mla=m if case == "k3" else "auto") for k, m in mla.items()]


def test_every_path_answers_as_a_fresh_model(checkpoints):
    case, old, new, tensors = checkpoints
    want = answers(llm(new))
    for fusion in paths(case):
        running = llm(old, fusion=fusion)
        before = answers(running)
        assert before != want
        assert running.update_weights(tensors.items()) > 100
        assert answers(running) == want, fusion


def test_cached_prefixes_are_forgotten(checkpoints):
    _, old, new, tensors = checkpoints
    running = llm(old)
    answers(running)
    assert running.generate(PROMPTS[0], GREEDY)[0].cached_tokens > 0
    running.update_weights(tensors.items())
    first, second = (running.generate(PROMPTS[0], GREEDY)[0] for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens > 0) == (0, True)
    want = llm(new, prefix_cache=False).generate(PROMPTS[0], GREEDY)[0].outputs[0]
    for got in (first.outputs[0], second.outputs[0]):
        assert (got.token_ids, got.logprobs) == (want.token_ids, want.logprobs)


def test_there_and_back(checkpoints):
    _, old, _, tensors = checkpoints
    running = llm(old)
    before = answers(running)
    running.update_weights(tensors.items())
    running.update_weights(iter(read(old).items()))
    assert answers(running) == before


def test_requests_in_flight_refuse_the_update_and_go_on_undisturbed(checkpoints):
    _, old, _, tensors = checkpoints
    running = llm(old)
    want = running.generate(PROMPTS[1], GREEDY)[0].outputs[0].text
    stream = running.stream(PROMPTS[1], GREEDY)
    pieces = [next(stream)]
    waiting = running.request("waits", GREEDY)
    running.engine.add(waiting)
    with pytest.raises(ValueError, match="update_weights: 1 requests are running and 1 waiting; finish or abort them"):
        running.update_weights(tensors.items())
    pieces += [piece for piece in stream if isinstance(piece, str)]
    assert "".join(pieces) == want
    running.engine.abort(waiting)
    running.update_weights(tensors.items())


def test_a_refused_update_leaves_answers_and_cache_as_they_were(checkpoints):
    _, old, _, tensors = checkpoints
    running = llm(old)
    before = answers(running)
    cached = running.generate(PROMPTS[0], GREEDY)[0].cached_tokens
    name = next(n for n in tensors if n.endswith("layers.2.self_attn.k_proj.weight"))
    with pytest.raises(ValueError, match=r"k_proj\.weight: shape"):
        running.update_weights([*(item for item in tensors.items() if item[0] != name), (name, torch.ones(3, 3))])
    assert running.generate(PROMPTS[0], GREEDY)[0].cached_tokens == cached > 0
    assert answers(running) == before
