"""What each exporter's dialect says about single modules; the released files are among the cases (check 40)."""

import copy

import pytest
from helpers.configs import K3_FILE, KL_FILE, kimi_k3, kimi_linear, small_k3, small_linear

from anabranch.config.hf import load_model_config, parse_model_config
from anabranch.models.tiny import tiny_config

DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
BLOCK = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": BLOCK}}}


def fp8_of(raw) -> set[str]:
    return set(parse_model_config(raw).fp8)


def names(layer: int, *leaves: str) -> set[str]:
    return {f"model.layers.{layer}.self_attn.{leaf}" for leaf in leaves}


KDA = ("q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj", "o_proj")
MLA = ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
EVERY = names(0, *KDA) | names(1, *KDA) | names(2, *KDA) | names(3, *MLA)


def test_the_released_configs_keep_attention_plain():
    """Experts-only MXFP4 says nothing about attention, whatever the config as a whole is called."""
    for file, experts in ((K3_FILE, "mxfp4"), (KL_FILE, "plain")):
        config = load_model_config(file)
        assert (config.expert_format, config.fp8) == (experts, ())


@pytest.mark.parametrize("dialect", [DEEPSEEK, MODELOPT, COMPRESSED], ids=["fp8", "modelopt", "compressed-tensors"])
def test_without_exceptions_every_attention_projection_is_coded(dialect):
    assert fp8_of(small_linear(quantization_config=dialect)) == EVERY
    assert parse_model_config(small_linear(quantization_config=dialect)).expert_format == "plain"


@pytest.mark.parametrize(
    ("dialect", "field"),
    [
        (DEEPSEEK, "modules_to_not_convert"),
        (DEEPSEEK, "ignored_layers"),
        (MODELOPT, "exclude_modules"),
        (MODELOPT, "ignore"),
        (COMPRESSED, "ignore"),
    ],
)
@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        ("b_proj", EVERY - names(0, "b_proj") - names(1, "b_proj") - names(2, "b_proj")),
        ("model.layers.1.self_attn.q_proj", EVERY - names(1, "q_proj")),
        ("model.layers.1", EVERY - names(1, *KDA)),
        ("layers.3.self_attn", EVERY - names(3, *MLA)),
        ("*layers.2.*", EVERY - names(2, *KDA)),
        ("re:.*self_attn.*", set()),
        ("re:.*(kv_b|f_a)_proj", {n for n in EVERY if "kv_b" not in n and ".f_a" not in n}),
        ("lm_head", EVERY),
        ("model.layers.10", EVERY),
        ("proj", EVERY),
    ],
)
def test_exceptions(dialect, field, pattern, left):
    assert fp8_of(small_linear(quantization_config=dialect | {field: [pattern]})) == left


def test_targets_and_mixtures():
    raw = small_k3()
    quant = raw["text_config"]["quantization_config"] = copy.deepcopy(
        tiny_config("k3", fp8=True)["text_config"]["quantization_config"]
    )
    config = parse_model_config(raw)
    assert config.expert_format == "mxfp4"
    assert names(0, "q_proj", "g_proj", "o_proj") | names(3, "q_a_proj", "q_b_proj", "g_proj") < set(config.fp8)
    quant["config_groups"]["group_1"]["targets"] = ["re:.*self_attn.q_proj"]
    assert fp8_of(raw) == names(0, "q_proj") | names(1, "q_proj") | names(2, "q_proj")
    single = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    layers = {"language_model.model.layers.1.self_attn.o_proj": {"quant_algo": "FP8_PB_WO"}}
    assert fp8_of(small_k3(quantization_config=single | {"quantized_layers": layers})) == names(1, "o_proj")


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "fp8"}, "quantization_config: field 'weight_block_size' is None; accepted: mxfp4-pack-q"),
        ({"quant_method": "fp8", "weight_block_size": [1, 128]}, "'weight_block_size' is [1, 128]"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'quant_algo' is 'NVFP4'"),
        ({"quant_algo": "FP8"}, "'quant_algo' is 'FP8'; accepted: mxfp4-pack-quantized, or block-FP8 with blocks of"),
        ({"quant_algo": "MIXED_PRECISION"}, "'quantized_layers' is None"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W4A8"}}}, "is 'W4A8'"),
        ({"config_groups": {"g": {"weights": BLOCK | {"num_bits": 4}}}}, "g: field 'format' is None"),
        ({"format": "int-quantized"}, "'format' is 'int-quantized'"),
        (DEEPSEEK | {"modules_to_not_convert": "mlp"}, "'modules_to_not_convert' is 'mlp'; need a list of names"),
        (COMPRESSED | {"ignore": [3]}, "'ignore' is [3]; need a list of names"),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [kimi_linear, kimi_k3])
def test_what_is_not_understood_is_refused_in_one_line(make, quantization, message):
    with pytest.raises(ValueError, match=r".") as caught:
        parse_model_config(make(quantization_config=quantization))
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
