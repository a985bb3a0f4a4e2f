"""Dummy weights: seeded, plausible, in place, equal where ranks must agree."""

import math

import pytest
import torch
from helpers.checkpoints import config_of, same

from anabranch.fusion.buffer import MergedWeight
from anabranch.models.dummy import load_dummy
from anabranch.models.kimi import KimiForCausalLM
from anabranch.models.weights import RULES, copy_shard, leaf_of
from anabranch.ops.mxfp4.reference import dequantize
from anabranch.parallel.layout import Layout

CONFIGS = {"kl": config_of("kl", vocab_size=269), "k3": config_of("k3", vocab_size=269)}


def dummy(case: str, seed: int = 0, dtype: torch.dtype = torch.float32, **kw) -> KimiForCausalLM:
    model = KimiForCausalLM(CONFIGS[case], dtype=dtype, **kw)
    load_dummy(model, seed)
    return model


def pooled(model: KimiForCausalLM, leaf: str) -> torch.Tensor:
    return torch.cat([view.flatten().float() for name, view in model.state_dict().items() if leaf_of(name) == leaf])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CONFIGS)
def test_same_seed_same_bits_and_no_value_left_out(case, dtype):
    a, b, c = dummy(case, 1, dtype), dummy(case, 1, dtype), dummy(case, 2, dtype)
    assert same(a, b)
    assert all(torch.isfinite(view).all() for view in a.state_dict().values())
    left, right = a.state_dict(), c.state_dict()
    constant = [n for n in left if torch.equal(left[n], right[n])]
    assert all(leaf_of(n).endswith("norm") or leaf_of(n) == "e_score_correction_bias" for n in constant)


def test_tensors_have_streams_of_their_own():
    views = dummy("kl").state_dict()
    q = [view for name, view in views.items() if leaf_of(name) in ("q_proj", "k_proj", "v_proj") and len(view) == 128]
    assert len({tuple(view.flatten()[:4].tolist()) for view in q}) == len(q)
    # a pruned model keeps the weights of the layers it shares
    short = KimiForCausalLM(
        config_of(
            "kl",
            vocab_size=269,
            num_hidden_layers=4,
            linear_attn_config={
                "head_dim": 16,
                "num_heads": 8,
                "short_conv_kernel_size": 4,
                "kda_layers": [1, 2, 3],
                "full_attn_layers": [4],
            },
        )
    )
    load_dummy(short, 0)
    assert all(torch.equal(view, views[name]) for name, view in short.state_dict().items())


@pytest.mark.parametrize("case", CONFIGS)
def test_magnitudes(case):
    model = dummy(case)
    assert all((v == 1).all() for n, v in model.state_dict().items() if leaf_of(n).endswith("norm"))
    assert not pooled(model, "e_score_correction_bias").any()
    assert abs(pooled(model, "o_proj").std() - 0.02) < 1e-3
    assert abs(pooled(model, "k_conv1d").std() - 0.25) < 0.02
    assert abs(pooled(model, "embed_tokens").std() - 1) < 0.02
    rates = pooled(model, "A_log").exp()
    assert (rates >= 1).all()
    assert (rates <= 16).all()
    assert rates.max() - rates.min() > 8
    bias = pooled(model, "dt_bias")
    if case == "kl":
        step = torch.nn.functional.softplus(bias)
        assert step.min() > 0.99e-3
        assert step.max() < 1.01e-1
        assert abs(step.log().mean() - math.log(1e-2)) < 0.2
    else:
        assert abs(bias.std() - 0.5) < 0.05


def test_mxfp4_experts():
    experts = dummy("k3").get_submodule("model.layers.1.block_sparse_moe.experts")
    values = dequantize(experts.w13_packed.flatten(0, 1), experts.w13_scale.flatten(0, 1), torch.float32)
    assert 0.015 < values.std() < 0.025
    assert len(experts.w2_packed.unique()) == 256
    assert len(experts.w2_scale.unique()) == 2


@pytest.mark.parametrize("case", CONFIGS)
def test_pads_stay_zero(case):
    for rank in range(4):
        model = dummy(case, parallel=Layout(tp=4).rank(rank))
        merged = [module for module in model.modules() if isinstance(module, MergedWeight)]
        assert sum(module.rows("pad").numel() for module in merged)
        assert not any(module.rows("pad").any() for module in merged)
        # 269 rows over 4 ranks of 68: the last rank holds 65
        real = 65 if rank == 3 else 68
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = model.state_dict()[name].abs().sum(1)
            assert (rows[:real] > 0).all()
            assert not rows[real:].any()


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=4, ep=2, dp_attention=2)], ids=str)
def test_ranks_agree_on_what_they_share_and_differ_elsewhere(layout):
    places = [layout.rank(rank) for rank in range(layout.tp)]
    states = [dummy("k3", parallel=place).state_dict() for place in places]
    for name in states[0]:
        rule = RULES[leaf_of(name)]
        for place, state in zip(places[1:], states[1:], strict=True):
            if name not in state or leaf_of(name) == "e_score_correction_bias":
                continue
            group = rule.group
            alike = group is None or getattr(place, f"{group}_rank") == getattr(places[0], f"{group}_rank")
            assert torch.equal(state[name], states[0][name]) == alike, name


@pytest.mark.parametrize("case", CONFIGS)
def test_the_shards_of_every_layout_are_parts_of_one_tensor(case):
    full = dummy(case).state_dict()
    for layout in (Layout(tp=4), Layout(tp=4, ep=2, dp_attention=2), Layout(tp=2, pp=2)):
        for rank in range(layout.world):
            place = layout.rank(rank)
            model = dummy(case, parallel=place)
            for name, view in model.state_dict().items():
                want = torch.empty_like(view)
                copy_shard(want, full[name], name, model.config, place)
                assert torch.equal(view, want), (layout, rank, name)
