"""Layout arithmetic: every rank has one place, groups have their sizes, and `check` is what the model can build."""

from collections import Counter
from dataclasses import fields, replace

import pytest
import torch
from helpers.configs import K3_FILE, kimi_linear, small_k3, small_linear
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.config.hf import load_model_config, parse_model_config
from anabranch.config.parallel import ParallelConfig
from anabranch.models.kimi import KimiForCausalLM
from anabranch.parallel.layout import Layout, stage_layers

SIZES = st.integers(1, 6)


@st.composite
def layouts(draw, divisors=SIZES, stages=SIZES):
    attn_tp, dp = draw(divisors), draw(divisors)
    tp = attn_tp * dp
    ep = draw(st.sampled_from([n for n in range(1, tp + 1) if tp % n == 0]))
    return Layout(tp=tp, dp_attention=dp, ep=ep, pp=draw(stages))


@settings(deadline=None)
@given(layouts())
def test_every_rank_has_exactly_one_place_in_every_group(layout):
    places = [layout.rank(r) for r in range(layout.world)]
    assert layout.world == layout.tp * layout.pp
    assert layout.attn_tp * layout.dp_attention == layout.tp
    assert Counter((p.pp_rank, p.tp_rank) for p in places) == Counter(
        (pp, tp) for pp in range(layout.pp) for tp in range(layout.tp)
    )
    for p in places:
        assert (p.tp_size, p.attn_tp_size, p.ep_size, p.pp_size) == (layout.tp, layout.attn_tp, layout.ep, layout.pp)
        assert p.moe_tp_size * p.ep_size == p.tp_size


@settings(deadline=None)
@given(layouts())
def test_groups_inside_a_stage_partition_its_ranks(layout):
    stage = [layout.rank(r) for r in range(layout.tp)]
    heads = Counter((p.tp_rank // layout.attn_tp, p.attn_tp_rank) for p in stage)
    assert heads == Counter((d, a) for d in range(layout.dp_attention) for a in range(layout.attn_tp))
    experts = Counter((p.ep_rank, p.moe_tp_rank) for p in stage)
    assert experts == Counter((e, m) for e in range(layout.ep) for m in range(layout.tp // layout.ep))
    for p in stage:  # groups are contiguous, so a replica sits on neighbouring ranks
        assert p.tp_rank == p.ep_rank * p.moe_tp_size + p.moe_tp_rank


@settings(deadline=None)
@given(st.integers(1, 120), st.data())
def test_stages_hold_every_layer_once_and_differ_by_one_at_most(layers, data):
    pp = data.draw(st.integers(1, layers))
    stages = [stage_layers(layers, pp, r) for r in range(pp)]
    assert [i for stage in stages for i in stage] == list(range(layers))
    sizes = [len(stage) for stage in stages]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_the_place_of_a_rank_by_hand():
    place = Layout(tp=8, dp_attention=4, ep=2, pp=3).rank(8 + 5)
    assert place == ParallelConfig(
        tp_size=8, tp_rank=5, attn_tp_size=2, attn_tp_rank=1, ep_size=2, ep_rank=1, pp_size=3, pp_rank=1
    )
    assert (place.moe_tp_size, place.moe_tp_rank) == (4, 1)


@pytest.mark.parametrize("name", [f.name for f in fields(Layout)])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_start_at_one(name, value):
    with pytest.raises(ValueError, match=f"^{name}={value}: need at least 1$"):
        Layout(**{name: value})


@pytest.mark.parametrize("name", ["dp_attention", "ep"])
def test_attention_replicas_and_expert_groups_divide_tp(name):
    with pytest.raises(ValueError, match=f"^{name}=3 does not divide tp=8$"):
        Layout(tp=8, **{name: 3})


def test_ranks_outside_the_layout():
    for rank in (-1, 6):
        with pytest.raises(ValueError, match=f"^rank={rank}: need 0 <= rank < 6$"):
            Layout(tp=3, pp=2).rank(rank)


def test_a_parallel_config_by_hand_is_checked():
    with pytest.raises(ValueError, match="tp_rank=2 with tp_size=2"):
        ParallelConfig(tp_size=2, tp_rank=2)
    with pytest.raises(ValueError, match="ep_size=2 does not divide tp_size=3"):
        ParallelConfig(tp_size=3, ep_size=2)


REFUSED = [
    (Layout(tp=5), "KDA heads (num_heads)=96 is not divisible by attention-TP (tp / dp_attention)=5"),
    (Layout(tp=64), "KDA heads (num_heads)=96 is not divisible by attention-TP (tp / dp_attention)=64"),
    (Layout(tp=24, ep=3), "num_experts=896 is not divisible by ep=3"),
    (Layout(tp=20, dp_attention=20), "intermediate_size=33792 is not divisible by tp=20"),
    (Layout(pp=94), "pp=94: the model has 93 layers"),
]


@pytest.mark.parametrize(("layout", "message"), REFUSED)
def test_a_broken_rule_is_named_in_one_line(layout, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - compared as a whole
        layout.check(load_model_config(K3_FILE))
    assert str(caught.value) == message


def test_every_rule_is_checked_on_its_own():
    c = parse_model_config(small_k3())
    assert c.moe is not None
    narrow = replace(c.moe, intermediate_size=6, shared_experts=1)
    attention = "=6 is not divisible by attention-TP (tp / dp_attention)=4"
    for config, layout, message in (
        (replace(c, kda=replace(c.kda, heads=6)), Layout(tp=4, ep=4), f"KDA heads (num_heads){attention}"),
        (replace(c, mla=replace(c.mla, heads=6)), Layout(tp=4, ep=4), f"MLA heads (num_attention_heads){attention}"),
        (replace(c, intermediate_size=90), Layout(tp=4, ep=4), "intermediate_size=90 is not divisible by tp=4"),
        (c, Layout(tp=4), "moe_intermediate_size / 4=16 is not divisible by MXFP4 group=32"),
        (
            replace(c, moe=narrow, expert_format="plain"),
            Layout(tp=4, ep=4),
            "shared expert width (moe_intermediate_size * num_shared_experts)=6 is not divisible by tp=4",
        ),
        (
            replace(c, moe=replace(c.moe, latent_size=48)),
            Layout(),
            "expert width=48 is not divisible by MXFP4 group=32",
        ),
    ):
        with pytest.raises(ValueError, match="not divisible") as caught:
            layout.check(config)
        assert str(caught.value) == message
    Layout(tp=4, ep=4).check(replace(c, intermediate_size=90, moe_layers=(True,) * 4))  # no dense layer reads it


def test_all_documented_sizes_are_legal():
    k3, kl = load_model_config(K3_FILE), parse_model_config(kimi_linear())
    for tp in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96):
        Layout(tp=tp).check(k3)
    for tp in (1, 2, 4, 8, 16, 32):
        Layout(tp=tp).check(kl)
    Layout(tp=16, dp_attention=16, ep=16).check(k3)


@pytest.mark.parametrize("make", [small_linear, small_k3])
@settings(max_examples=60, deadline=None)
@given(layout=layouts(st.sampled_from([1, 2, 3, 4]), st.integers(1, 4)))
def test_check_accepts_exactly_what_every_rank_can_build(make, layout):
    config = parse_model_config(make())
    try:
        layout.check(config)
    except ValueError:
        with pytest.raises(ValueError, match="not divisible"):
            _build(config, layout)
    else:
        _build(config, layout)


def _build(config, layout):
    for rank in range(layout.world):
        KimiForCausalLM(config, parallel=layout.rank(rank), dtype=torch.bfloat16, device="meta")
