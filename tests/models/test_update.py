"""Weights that change in a loaded model: bit-equal to a fresh load, in place, and never by halves."""

import random
from dataclasses import replace

import pytest
import torch
from helpers.checkpoints import (
    config_of,
    dequantized,
    in_memory,
    official,
    raw_fp8,
    swapped_ffn,
    weights_of,
    without_model,
    write,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.config.hf import parse_model_config
from anabranch.models.checkpoint import load_checkpoint
from anabranch.models.kimi import KimiForCausalLM
from anabranch.models.update import update_weights
from anabranch.ops.fp8_linear.reference import CODES, dequantize, quantize
from anabranch.parallel.layout import Layout

CONFIGS = {
    "kl": config_of("kl"),
    "k3": config_of("k3"),
    "k3-plain": config_of("k3", quantization_config=None),
    "kl-fp8": parse_model_config(raw_fp8("kl")),
    "k3-fp8": parse_model_config(raw_fp8("k3")),
}
CASES = pytest.mark.parametrize("case", CONFIGS)
KL, K3, FP8 = CONFIGS["kl"], CONFIGS["k3"], CONFIGS["kl-fp8"]
Q = "model.layers.0.self_attn.q_proj.weight"
EXPERT = "model.layers.1.block_sparse_moe.experts.3.w1"


def fresh(config, tensors, tmp_path, name="x", **kw) -> KimiForCausalLM:
    model = KimiForCausalLM(config, **kw)
    load_checkpoint(model, write(tensors, tmp_path / name))
    return model


def bits(model: KimiForCausalLM) -> dict[str, bytes]:
    return {n: t.reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in model.state_dict().items()}


def storages(model: KimiForCausalLM) -> dict[str, int]:
    return {name: p.data_ptr() for name, p in model.named_parameters()}


@CASES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_weights_at_once_equal_a_fresh_load_and_keep_their_storage(case, dtype, tmp_path):
    """Check 15: every path reads the live storage, so equal bits in the same place are equal paths."""
    config = CONFIGS[case]
    old, new = official(config, 0), official(config, 1)
    model = fresh(config, old, tmp_path, "old", dtype=dtype)
    before = storages(model)
    assert update_weights(model, new.items()) == sum(not n.endswith("_scale_inv") for n in model.state_dict())
    assert storages(model) == before
    assert bits(model) == bits(fresh(config, new, tmp_path, "new", dtype=dtype))


@pytest.mark.parametrize("case", ["kl-fp8", "k3-fp8"])
def test_plain_values_are_quantised_again(case, tmp_path):
    config = CONFIGS[case]
    model = fresh(config, official(config, 0), tmp_path, "old")
    plain = dequantized(official(config, 1))
    update_weights(model, plain.items())
    scales = {}
    for name, tensor in official(config, 1).items():
        if tensor.dtype == CODES:
            scales[name], scales[f"{name}_scale_inv"] = quantize(plain[name])
    want = fresh(config, official(config, 1) | scales, tmp_path, "new").state_dict()
    for name, view in model.state_dict().items():
        if view.dtype == CODES or name.endswith("_scale_inv"):
            assert torch.equal(view.view(torch.uint8), want[name].view(torch.uint8)), name
        else:  # what is dequantised at load takes the plain values as they are
            prefix = "language_model." if config.is_k3 else ""
            given = plain[prefix + name]
            given = given.flatten()[: config.kda.heads] if name.endswith("A_log") else given
            assert torch.equal(view, given.to(view.dtype)), name


def test_codes_for_a_weight_that_is_held_plain(tmp_path):
    """f_a, b and f_b are dequantised copies: an update refreshes them like any other (check 15)."""
    model = fresh(FP8, official(FP8), tmp_path)
    for leaf in ("f_a_proj", "b_proj", "f_b_proj", "g_b_proj"):
        name = Q.replace("q_proj", leaf)
        codes, scale = quantize(torch.randn(model.state_dict()[name].shape))
        update_weights(model, [(name, codes), (f"{name}_scale", scale[:, None, :, None])])
        assert torch.equal(model.state_dict()[name], dequantize(codes, scale))


def test_codes_for_a_model_without_any(tmp_path):
    model = fresh(KL, official(KL), tmp_path)
    codes, scale = quantize(torch.randn(128, 64))
    assert update_weights(model, [(f"{Q}_scale_inv", scale), (Q, codes)]) == 1
    assert torch.equal(model.state_dict()[Q], dequantize(codes, scale))


@pytest.mark.parametrize("spell", [without_model, swapped_ffn, in_memory], ids=lambda f: f.__name__)
def test_spellings(spell, tmp_path):
    model, new = fresh(KL, official(KL), tmp_path, "old"), official(KL, 1)
    update_weights(model, (spell(new, KL) if spell is in_memory else spell(new)).items())
    assert bits(model) == bits(fresh(KL, new, tmp_path, "new"))


@pytest.mark.parametrize("case", ["k3", "k3-fp8"])
@pytest.mark.parametrize("layout", [Layout(tp=2, ep=2), Layout(tp=4)], ids=str)
def test_every_rank_takes_its_shard(case, layout, tmp_path):
    config = CONFIGS[case]
    if case == "k3-fp8":
        raw = raw_fp8("k3", num_attention_heads=16)
        raw["text_config"]["linear_attn_config"] |= {"num_heads": 16}
        config = parse_model_config(raw)
    old, new = official(config, 0), official(config, 1)
    for rank in range(layout.tp):
        kw = {"parallel": layout.rank(rank)}
        model, want = fresh(config, old, tmp_path, "old", **kw), fresh(config, new, tmp_path, "new", **kw)
        update_weights(model, new.items())
        assert bits(model) == bits(want)
        if case == "k3-fp8":
            # shards quantised on their own have the codes of the whole
            update_weights(model, ((n, t) for n, t in dequantized(old).items()))
            again = fresh(config, old | _requantised(old), tmp_path, "again", **kw)
            coded = {n for n, t in again.state_dict().items() if t.dtype == CODES or n.endswith("_scale_inv")}
            assert len(coded) > 20 if layout.tp == 2 else coded
            assert {n: b for n, b in bits(model).items() if n in coded} == {
                n: b for n, b in bits(again).items() if n in coded
            }


def _requantised(tensors):
    found = {}
    for name, tensor in dequantized(tensors).items():
        if tensors[name].dtype == CODES:
            found[name], found[f"{name}_scale_inv"] = quantize(tensor)
    return found


def test_a_part_leaves_the_rest_alone(tmp_path):
    model = fresh(KL, official(KL), tmp_path)
    before = bits(model)
    update_weights(model, [(Q, torch.ones(128, 64))])
    after = bits(model)
    assert {n for n in after if after[n] != before[n]} == {Q}
    assert not model.get_submodule("model.layers.0.self_attn").in_proj.rows("pad").any()


def test_nothing_at_all(tmp_path):
    model = fresh(KL, official(KL), tmp_path)
    before = bits(model)
    assert update_weights(model, []) == 0
    assert bits(model) == before


X = torch.ones(128, 64)
REFUSED = [
    (KL, [("model.layers.0.self_attn.z_proj.weight", X)], "model.layers.0.self_attn.z_proj.weight: no such weight"),
    (KL, [("model.layers.6.self_attn.q_proj.weight", X)], "q_proj.weight: this model does not use it"),
    (KL, [(Q, X[:64])], f"{Q}: shape [64, 64], need [128, 64]"),
    (KL, [(Q, X.T)], f"{Q}: shape [64, 128], need [128, 64]"),
    (KL, [(Q, X.long())], f"{Q}: dtype int64, need one of bfloat16, float16, float32, float64, float8_e4m3fn"),
    (KL, [("model.norm.weight", torch.ones(64).to(CODES))], "model.norm.weight: dtype float8_e4m3fn, need one of bf"),
    (KL, [(Q, X), (f"language_model.{Q}", X)], f"language_model.{Q}: {Q} is there twice, also as {Q}"),
    (KL, [(Q, X.to(CODES))], f"{Q}: needs {Q}_scale_inv in the same update"),
    (KL, [(f"{Q}_scale", torch.ones(1, 1))], f"{Q}_scale: needs {Q} in the same update"),
    (KL, [(Q, X), (f"{Q}_scale_inv", torch.ones(1, 1))], f"{Q}_scale_inv: {Q} is float32, which has no scales"),
    (KL, [(Q, X.to(CODES)), (f"{Q}_scale", torch.ones(1))], f"{Q}_scale: shape [1], need [1, 1]"),
    (KL, [(Q, X * torch.nan)], f"{Q}: holds a value that is NaN, or infinite in the dtype of the weight"),
    (KL, [(Q, (X * torch.nan).to(CODES)), (f"{Q}_scale", torch.ones(1, 1))], f"{Q}: holds a value that is NaN"),
    (KL, [(Q, X.to(CODES)), (f"{Q}_scale", torch.full((1, 1), torch.inf))], f"{Q}_scale: holds a value"),
    (KL, [(Q, torch.ones(128, 64, device="meta"))], f"{Q}: need a tensor with values, not one on meta"),
    (KL, [(Q, [1.0])], f"{Q}: need a tensor with values, not [1.0]"),
    (K3, [(f"{EXPERT}.weight", X)], f"{EXPERT}.weight: the experts are MXFP4; give .weight_packed and .weight_scale"),
    (
        K3,
        [(f"{EXPERT}.weight_packed", torch.zeros(256, 16, dtype=torch.uint8))],
        f"{EXPERT}.weight_packed: needs {EXPERT}.weight_scale in the same update",
    ),
    (
        K3,
        [
            (f"{EXPERT}.weight_packed", torch.zeros(256, 16, dtype=torch.uint8)),
            (f"{EXPERT}.weight_scale", torch.full((256, 1), 255, dtype=torch.uint8)),
        ],
        f"{EXPERT}.weight_scale: holds a value",
    ),
    (K3, [("vision_tower.x", X)], "vision_tower.x: this model does not use it"),
    (FP8, [(Q, X * torch.inf)], f"{Q}: holds a value"),
]


@pytest.mark.parametrize(("config", "wrong", "message"), REFUSED, ids=range(len(REFUSED)))
def test_one_fault_refuses_everything(config, wrong, message, tmp_path):
    model = fresh(config, official(config), tmp_path)
    before = bits(model)
    good = [("model.norm.weight", torch.full((64,), 3.0)), ("model.layers.1.self_attn.dt_bias", torch.ones(128))]
    with pytest.raises(ValueError, match=r".") as caught:
        update_weights(model, [good[0], *wrong, good[1]] if "norm" not in message else [good[1], *wrong])
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert bits(model) == before


def test_overflow_of_the_dtype_in_which_it_is_held(tmp_path):
    model = fresh(KL, official(KL), tmp_path, dtype=torch.float16)
    before = bits(model)
    with pytest.raises(ValueError, match="infinite in the dtype of the weight"):
        update_weights(model, [(Q, X * 1e5)])
    assert bits(model) == before
    update_weights(model, [("model.layers.0.self_attn.dt_bias", torch.full((128,), 1e5))])  # fp32 wherever it is held


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 30), count=st.integers(1, 40))
def test_any_sequence_of_updates_ends_where_a_fresh_load_would(seed, count):
    """Random parts, in random order, some of them refused: the model always holds the last accepted values."""
    rng = random.Random(seed)
    config = CONFIGS["kl-fp8"]
    held = [weights_of(config, s, torch.bfloat16) for s in range(3)]
    model, current = KimiForCausalLM(config), dict(held[0])
    update_weights(model, current.items())
    modules = [n.removesuffix(".weight") for n in current if n.endswith(".weight")]
    for _ in range(count):
        source, ends = rng.choice(held), (".weight", ".weight_scale_inv")
        part = {m + end: source[m + end] for m in rng.sample(modules, 3) for end in ends if m + end in source}
        bad = [("model.layers.0.self_attn.q_proj.bias", X)] if rng.random() < 0.3 else []
        items = [*part.items(), *bad]
        rng.shuffle(items)
        try:
            update_weights(model, items)
            assert not bad
            current |= part
        except ValueError:
            assert bad
    want = KimiForCausalLM(config)
    update_weights(want, current.items())
    assert bits(model) == bits(want)


def test_configs_that_differ_in_quantisation_alone_take_each_other_s_names(tmp_path):
    plain = fresh(replace(FP8, fp8=()), dequantized(official(FP8)), tmp_path)
    update_weights(plain, official(FP8, 1).items())
    want = fresh(replace(FP8, fp8=()), dequantized(official(FP8, 1)), tmp_path, "new")
    assert bits(plain) == bits(want)
