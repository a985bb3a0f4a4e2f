"""Two GPUs ahead against the same two that wait, and prompts by all-to-all or from graphs against plain ones.

Four layers with the shapes of Kimi-Linear-48B and dummy weights, decode steps from graphs.
"""

import json
import random
from pathlib import Path

import pytest
import torch

from anabranch import LLM, SamplingParams
from anabranch.fusion import counters

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2 or torch.cuda.get_device_properties(0).total_memory < 100e9,
    reason="needs two GPUs of 100 GB or more",
)
LAYERS = 4
OPTIONS = {"load_format": "dummy", "max_seqs": 4, "max_len": 2304, "graph_sizes": [1, 2, 4], "prefix_cache": False}
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
WISHES = [
    GREEDY,
    SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9, seed=4, ignore_eos=True),
    SamplingParams(max_tokens=31, temperature=0.8, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0.0, min_tokens=4, repetition_penalty=1.5, ignore_eos=True),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    source = Path(__file__).parents[1] / "data/configs/kimi_linear_48b_config.json"
    config = json.loads(source.read_text())
    config["num_hidden_layers"] = LAYERS
    kinds = config["linear_attn_config"]
    for name in ("kda_layers", "full_attn_layers"):
        kinds[name] = [i for i in kinds[name] if i <= LAYERS]
    path = tmp_path_factory.mktemp("ahead")
    (path / "config.json").write_text(json.dumps(config))
    return path


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(160_000) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "dp_attention": 2, "ep": 2}, {"pp": 2}], ids=str)
def test_launching_ahead_changes_no_bit(model, layout):
    asked = prompts(1, 70, 5, 130, 3, 64, 2, 9)
    with LLM(model, deterministic=True, **OPTIONS, **layout) as llm:
        engine = llm.engine
        assert (engine.ahead, engine.follow, engine.depth) == (True, "pp" not in layout, 2)
        ahead = [llm.generate(asked, params) for params in (GREEDY, WISHES * 2)]
        assert sum(engine.runner.graph_replays.values()) > 20
        # the same ranks, one step at a time
        engine.follow, engine.depth, engine._kept = False, engine.fleet.layout.pp, 0
        plain = [llm.generate(asked, params) for params in (GREEDY, WISHES * 2)]
    for one, other in zip((o for run in ahead for o in run), (o for run in plain for o in run), strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
    assert len({token for o in plain[0] for token in o.outputs[0].token_ids}) > 12, "degenerate answers prove nothing"


def test_prompts_sent_to_their_experts_are_scored_as_gathered_ones(model):
    scored = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    [prompt] = prompts(2000)
    with LLM(model, **OPTIONS, tp=2, dp_attention=2, ep=2) as llm, counters.counting() as alone:
        # the other replica has one row: gathered, its block would be padded to the prompt's length
        [sent] = llm.generate([prompt], scored)
        with counters.counting() as together:
            gathered = llm.generate([prompt, prompt], scored)
    assert alone["moe.all_to_all"] == LAYERS - 1  # the first layer is dense
    assert not together["moe.all_to_all"]
    want = torch.tensor([p for p, _ in gathered[0].prompt_logprobs[1:]])
    got = torch.tensor([p for p, _ in sent.prompt_logprobs[1:]])
    assert got.isfinite().all()
    assert (got - want).abs().mean() < 0.02
    assert (got - want).abs().max() < 0.5


@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "dp_attention": 2, "ep": 2}, {"pp": 2}], ids=str)
def test_prompts_from_graphs_are_scored_as_eager_ones(model, layout):
    asked, first = prompts(64, 300, 1000), SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    with LLM(model, **OPTIONS, **layout) as llm:
        replayed = [llm.generate([p], first)[0].outputs[0] for p in asked]
        assert llm.engine.runner.prompt_replays == {64: 1, 384: 1, 1024: 1}
        if "dp_attention" in layout:  # one prompt for each replica, replayed at once
            both = llm.generate([asked[1], asked[1]], first)
            assert llm.engine.runner.prompt_replays[384] == 2
            scores = [answer.outputs[0].logprobs[0] for answer in both]
            assert scores == pytest.approx([replayed[1].logprobs[0]] * 2, abs=0.1)
        llm.engine.runner.prompts = None  # the head decides for all ranks
        eager = [llm.generate([p], first)[0].outputs[0] for p in asked]
    for one, other in zip(replayed, eager, strict=True):
        assert one.logprobs[0] == pytest.approx(other.logprobs[0], abs=0.1)
    assert sum(one.token_ids == other.token_ids for one, other in zip(replayed, eager, strict=True)) >= 2
