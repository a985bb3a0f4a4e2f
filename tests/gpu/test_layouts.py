"""Two GPUs against one, deterministic, with the shapes of Kimi-Linear-48B and dummy weights, the same in every layout.

Pipeline stages change no bit. Tensor and expert parallelism change the order of sums: in fp32 that leaves every greedy
token alone. Eight layers, so that fp32 fits on one GPU; `benchmarks/layouts.py --equality` compares the whole model.
"""

import gc
import json
import random
from pathlib import Path

import pytest
import torch

from anabranch import LLM, SamplingParams

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2 or torch.cuda.get_device_properties(0).total_memory < 100e9,
    reason="needs two GPUs of 100 GB or more",
)
OPTIONS = {"load_format": "dummy", "deterministic": True, "max_seqs": 4, "max_len": 512, "graph_sizes": [1, 2, 4]}
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
LENGTHS = (1, 5, 64, 65, 130, 300)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    source = Path(__file__).parents[1] / "data/configs/kimi_linear_48b_config.json"
    config = json.loads(source.read_text())
    config["num_hidden_layers"] = 8
    kinds = config["linear_attn_config"]
    for name in ("kda_layers", "full_attn_layers"):
        kinds[name] = [i for i in kinds[name] if i <= 8]
    path = tmp_path_factory.mktemp("layouts")
    (path / "config.json").write_text(json.dumps(config))
    return path


def answers(model: Path, dtype: str, **layout: int):
    rng = random.Random(3)
    prompts = [[rng.randrange(160_000) for _ in range(length)] for length in LENGTHS]
    with LLM(model, dtype=dtype, **OPTIONS, **layout) as llm:
        outputs = llm.generate(prompts, PARAMS)
        replays = sum(llm.engine.runner.graph_replays.values())
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    assert replays, "the decode steps must have been graphs"
    tokens = [o.outputs[0].token_ids for o in outputs]
    scores = [[p for p, _ in o.prompt_logprobs[1:]] + o.outputs[0].logprobs for o in outputs]
    return tokens, scores


@pytest.fixture(scope="module")
def one(model):
    return {dtype: answers(model, dtype) for dtype in ("float32", "bfloat16")}


def test_pipeline_stages_change_no_bit(model, one):
    assert answers(model, "bfloat16", pp=2) == one["bfloat16"]


@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "dp_attention": 2, "ep": 2}], ids=str)
def test_other_orders_of_sums_change_no_token(model, one, layout):
    tokens, scores = answers(model, "float32", **layout)
    assert len({token for answer in tokens for token in answer}) > 12, "degenerate answers prove nothing"
    assert tokens == one["float32"][0]
    for got, want in zip(scores, one["float32"][1], strict=True):
        assert got == pytest.approx(want, abs=2e-3)
    # in bf16 a near tie may fall the other way: what was given is scored alike
    tokens, scores = answers(model, "bfloat16", **layout)
    for length, got, want in zip(LENGTHS, scores, one["bfloat16"][1], strict=True):
        assert got[: length - 1] == pytest.approx(want[: length - 1], abs=0.25)
