"""A decay that is finished inside the decode step: the same outputs and states as separate GEMMs, wherever it ends."""

import json

import pytest
import torch
from helpers.oracle import Session, engine_model, model_config
from helpers.ref_tiny import kimi_k3_tiny, random_weights

from anabranch import LLM, SamplingParams
from anabranch.config.fusion import FusionConfig
from anabranch.config.parallel import ParallelConfig
from anabranch.fusion import counters
from anabranch.fusion.costs import FORMAT, shape_key
from anabranch.fusion.kda_paths import kda_paths
from anabranch.fusion.plan import EAGER
from anabranch.layers.kda import KdaLayer
from anabranch.models.kimi import KimiForCausalLM
from anabranch.models.tiny import init_checkpoint
from anabranch.ops.kda_step.reference import kda_step
from anabranch.ops.kda_step.spec import KDA_STEP

STEP = {"kda_step": "reference"}
DEFERRED = FusionConfig(kda="deferred")
ROWS = (1, 2, 7, 16, 17, 32, 64, 65, 128, 129, 512)
BOUND = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}


def one_layer(heads: int, attn_tp: int, dtype: torch.dtype, bound: float | None) -> KdaLayer:
    """A KDA layer with random weights at the widths of one rank."""
    config = model_config(kimi_k3_tiny(kda_heads=heads, heads=heads, lower_bound=bound))
    parallel = ParallelConfig(tp_size=attn_tp, attn_tp_size=attn_tp, attn_tp_rank=attn_tp - 1)
    model = KimiForCausalLM(config, parallel=parallel, dtype=dtype, ops=STEP, fusion=DEFERRED)
    layer = model.model.layers["0"].self_attn
    for name, view in layer.state_dict().items():
        view.copy_(torch.randn(view.shape) / view.shape[-1] ** 0.5 if view.dim() > 1 else torch.rand(view.shape) + 0.5)
        assert name
    return layer


def decoded(layer: KdaLayer, path: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of one token of each request and their states, from states that a decay changes."""
    requests, width, dim = x.shape[0], layer.width, layer.config.head_dim
    generator = torch.Generator().manual_seed(1)
    state = torch.randn(requests, layer.heads, dim, dim, generator=generator)
    pool = torch.randn(requests, 3, 3 * width, generator=generator).to(x.dtype)
    inputs = kda_paths(True)[path].run(layer.prologue.weights, x)
    forget, f_b = inputs.decay()
    shared = (layer.dt_bias, layer.A_log, layer.config.gate_lower_bound, layer.o_norm.weight, layer.eps)
    given = (inputs.qkv, pool, layer.conv.buffer.squeeze(1), forget, inputs.beta, inputs.gate, *shared)
    y = kda_step(*given, torch.arange(requests), state, early=True, f_b=f_b)
    return y, state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "attn_tp"), [(24, 1), (24, 2), (24, 4), (24, 8), (3, 1), (5, 1), (6, 2)], ids=lambda v: str(v)
)
def test_a_step_with_f_b_inside_equals_separate_gemms(heads, attn_tp, dtype):
    torch.manual_seed(0)
    layer = one_layer(heads, attn_tp, dtype, -5.0 if heads % 2 else None)  # either form of the decay
    x = torch.randn(max(ROWS), 64).to(dtype)
    for rows in ROWS if attn_tp in (1, 8) else (1, 17, 65):
        with counters.counting() as ran:
            y, state = decoded(layer, "deferred", x[:rows])
        assert ran == {"kda.gemm": 1, "kda.f_b_in_step": 1}
        want, wanted = decoded(layer, "separate", x[:rows])
        KDA_STEP.equality.check(y, want, f"M={rows}")
        torch.testing.assert_close(state, wanted, rtol=BOUND[dtype], atol=BOUND[dtype] * wanted.abs().max().item())


def test_a_wrong_f_b_would_be_seen():
    """The comparison above holds the decay: with another f_b it fails."""
    torch.manual_seed(0)
    layer = one_layer(6, 1, torch.float32, -5.0)
    x = torch.randn(7, 64)
    want, _ = decoded(layer, "separate", x)
    layer.second.rows("f_b_proj").mul_(1.01)
    with pytest.raises(AssertionError):
        KDA_STEP.equality.check(decoded(layer, "deferred", x)[0], want)


def whole_and_deferred(tiny) -> list[KimiForCausalLM]:
    weights = random_weights(tiny, 3)
    return [engine_model(tiny, weights, FusionConfig(kda=kda), ops=STEP) for kda in ("whole", "deferred")]


@pytest.fixture
def models():
    return whole_and_deferred(kimi_k3_tiny(layers=5, kda_layers=(1, 2, 3), full_layers=(4, 5)))


def test_prompts_finish_it_by_the_product_of_whole(models):
    """A pass of prompts has the bits of `whole`, and as many GEMMs."""
    runs = []
    for model, path in zip(models, ("whole", "deferred"), strict=True):
        with counters.counting() as ran:
            runs.append(Session(model).step((0, list(range(9))), (1, [4, 5]))[0])
        assert (ran[f"kda.{path}"], ran["kda.gemm"], ran["kda.f_b_in_step"]) == (3, 6, 0)
        assert ran["kda.f_b_late"] == (3 if path == "deferred" else 0)
    assert torch.equal(*runs)


def test_a_pass_of_both_ends_it_twice(models):
    """Decodes leave f_b to the step, prompts of the same pass have it multiplied."""
    outputs = []
    for model in models:
        session = Session(model)
        session.step((0, list(range(9))))
        with counters.counting() as ran:
            outputs.append(torch.cat(session.step((0, [3]), (1, [1, 2, 3, 4]), decodes=1)))
    assert (ran["kda.deferred"], ran["kda.gemm"], ran["kda.f_b_in_step"], ran["kda.f_b_late"]) == (3, 6, 3, 3)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


def test_new_weights_reach_the_step(models):
    """The step reads f_b where the model holds it: an update in place is seen."""
    whole, deferred = models
    for model in models:
        for layer in model.model.layers.values():
            if hasattr(layer.self_attn, "second"):
                layer.self_attn.second.rows("f_b_proj").mul_(-2.0)
    outputs = []
    for model in (whole, deferred):
        session = Session(model)
        session.step((0, list(range(9))))
        outputs.append(torch.cat([session.step((0, [t]), decodes=1)[0] for t in (3, 4)]))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


def test_an_engine_answers_alike_and_says_what_ran(tmp_path):
    init_checkpoint("k3", tmp_path)
    greedy, answers = SamplingParams(temperature=0.0, max_tokens=12), []
    for kda in ("separate", "deferred"):
        llm = LLM(tmp_path, max_seqs=3, max_len=64, fusion=FusionConfig(kda=kda), ops=STEP)
        with counters.counting() as ran:
            outputs = llm.generate([[5, 6, 7], [9] * 20], greedy)
        answers.append([o.outputs[0].token_ids for o in outputs])
    assert answers[0] == answers[1]
    assert ran["kda.f_b_in_step"] > 0
    assert ran["kda.deferred"] >= ran["kda.f_b_in_step"]


def test_deterministic_mode_and_a_cpu_refuse_it_with_the_reason(tmp_path):
    init_checkpoint("k3", tmp_path)
    for options, reason in (
        ({"deterministic": True}, "deterministic mode decodes by the operations of prompts, which take no f_b"),
        ({}, "f_b inside the decode step needs kda_step=cuda or reference, here it is cpu"),
    ):
        with pytest.raises(ValueError, match="fusion kda=deferred cannot be honoured") as caught:
            LLM(tmp_path, max_seqs=1, max_len=64, fusion=DEFERRED, **options)
        assert str(caught.value).endswith(reason)


def test_auto_takes_it_by_measured_times_where_the_step_can(tmp_path):
    config = model_config(kimi_k3_tiny())
    us = {"whole": 10.0, "fused": 9.0, "deferred": 5.0}
    where = {"kind": "kda", "shape": shape_key(config, "kda", 1, "float32"), "graph": False, "deterministic": False}
    cell = where | {"rows": 64, "context": 512, "us": us, "spread_us": 0.5}
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"format": FORMAT, "device": "cpu", "runs": [{}], "cells": [cell]}))
    fusion = FusionConfig(table=str(file))
    picked = {
        step: KimiForCausalLM(config, fusion=fusion, ops={"kda_step": step}).plan.kda.pick(1, EAGER)
        for step in ("chain", "reference")
    }
    assert picked == {"chain": "fused", "reference": "deferred"}
