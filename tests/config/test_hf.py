"""Reading config.json: the real files, transformers' form, and one line for everything that is wrong."""

import json

import pytest
from helpers.configs import K3_FILE, KL_FILE, kimi_k3, kimi_linear, small_k3, small_linear

from anabranch.config.hf import load_model_config, parse_model_config


def test_kimi_linear():
    c = load_model_config(KL_FILE)
    assert (c.architecture, c.is_k3) == ("kimi_linear", False)
    assert (c.layers, c.layer_count("kda"), c.layer_count("mla")) == (27, 20, 7)
    assert [i for i, kind in enumerate(c.layer_kinds) if kind == "mla"] == [3, 7, 11, 15, 19, 23, 26]
    assert c.moe_layers == (False, *[True] * 26)
    assert (c.hidden_size, c.vocab_size, c.intermediate_size, c.rms_norm_eps) == (2304, 163840, 9216, 1e-5)
    assert c.activation.name == "silu"
    assert (c.kda.heads, c.kda.head_dim, c.kda.width, c.kda.conv_size) == (32, 128, 4096, 4)
    assert (c.kda.gate_lower_bound, c.kda.full_rank_gate) == (None, False)
    assert (c.mla.heads, c.mla.q_lora_rank, c.mla.qk_dim, c.mla.latent_dim, c.mla.v_dim) == (32, None, 192, 576, 128)
    assert (c.mla.output_gate, c.mla.norm_eps) == (False, 1e-6)
    assert c.moe is not None
    assert (c.moe.experts, c.moe.top_k, c.moe.shared_experts, c.moe.intermediate_size) == (256, 8, 1, 1024)
    assert (c.moe.groups, c.moe.top_groups, c.moe.scoring, c.moe.renormalize) == (1, 1, "sigmoid", True)
    assert (c.moe.scaling, c.moe.latent_size, c.moe.latent_norm) == (2.446, None, False)
    assert (c.attn_res_block, c.max_context, c.dtype, c.expert_format) == (None, 1 << 20, "bfloat16", "plain")
    assert (c.bos_id, c.eos_ids, c.pad_id) == (163584, (163586,), 163839)


def test_kimi_k3():
    c = load_model_config(K3_FILE)
    assert (c.architecture, c.is_k3) == ("kimi_k3", True)
    assert (c.layers, c.layer_count("kda"), c.layer_count("mla")) == (93, 69, 24)
    assert [i for i, kind in enumerate(c.layer_kinds) if kind == "mla"] == [*range(3, 92, 4), 92]
    assert c.moe_layers == (False, *[True] * 92)
    assert (c.hidden_size, c.intermediate_size) == (7168, 33792)
    assert (c.activation.name, c.activation.beta, c.activation.linear_beta) == ("situ", 4.0, 25.0)
    assert (c.kda.heads, c.kda.width, c.kda.gate_lower_bound, c.kda.full_rank_gate) == (96, 12288, -5.0, True)
    assert (c.mla.heads, c.mla.q_lora_rank, c.mla.output_gate) == (96, 1536, True)
    assert c.moe is not None
    assert (c.moe.experts, c.moe.top_k, c.moe.shared_experts, c.moe.intermediate_size) == (896, 16, 2, 3072)
    assert (c.moe.scaling, c.moe.latent_size, c.moe.latent_norm) == (1.0, 3584, True)
    assert (c.attn_res_block, c.max_context, c.expert_format) == (12, 1 << 20, "mxfp4")


RESAVED = {  # the field names that transformers writes; no nested linear_attn_config
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_shared_experts": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_renormalize": True,
    "routed_scaling_factor": 2.446,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_head_dim": 192,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "head_dim": 64,
    "hidden_act": "silu",
    "model_max_length": 1048576,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["full_attention" if i in (3, 7, 11, 15, 19, 23, 26) else "linear_attention" for i in range(27)],
    "mlp_layer_types": ["dense"] + ["sparse"] * 26,
}


def test_the_form_transformers_saves_reads_the_same():
    assert parse_model_config(RESAVED) == load_model_config(KL_FILE)


def test_transformers_itself_saves_what_reads_the_same(tmp_path):
    transformers = pytest.importorskip("transformers")
    raw = {k: v for k, v in kimi_linear().items() if k not in ("auto_map", "rope_scaling")}
    transformers.KimiLinearConfig(**raw).save_pretrained(tmp_path)
    assert load_model_config(tmp_path) == load_model_config(KL_FILE)


def test_layer_lists_of_the_resaved_form_are_not_reinterpreted():
    moved = RESAVED | {
        "layer_types": ["full_attention"] + ["linear_attention"] * 26,
        "mlp_layer_types": ["sparse"] * 27,
    }
    c = parse_model_config(moved)
    assert (c.layer_kinds[0], c.layer_count("mla"), c.moe_layers) == ("mla", 1, (True,) * 27)


def test_only_the_outer_names_make_it_k3():
    raw = kimi_k3()
    assert raw["text_config"]["model_type"] == "kimi_linear"
    assert parse_model_config(raw).architecture == "kimi_k3"
    assert parse_model_config(raw["text_config"]).architecture == "kimi_linear"
    by_class = {k: v for k, v in raw.items() if k != "model_type"}
    assert parse_model_config(by_class).architecture == "kimi_k3"
    inner_claim = kimi_linear(text_config={"model_type": "kimi_k3"})
    assert parse_model_config(inner_claim) == load_model_config(KL_FILE)


def test_quantization_is_found_inside_and_outside_text_config():
    raw = kimi_k3()
    quant = raw["text_config"].pop("quantization_config")
    assert parse_model_config(raw).expert_format == "plain"
    raw["quantization_config"] = quant
    assert parse_model_config(raw).expert_format == "mxfp4"


def test_junk_keys_change_nothing():
    junk = {"head_dim": 7, "rope_theta": 1.0, "rope_scaling": {"type": "yarn"}, "num_key_value_heads": 1, "top_k": 3}
    assert parse_model_config(kimi_linear(**junk)) == load_model_config(KL_FILE)
    assert parse_model_config(kimi_k3(**junk)) == load_model_config(K3_FILE)


def test_fields_have_their_documented_defaults():
    c = parse_model_config(
        kimi_k3(activation_situ_beta=None, activation_situ_linear_beta=None, attn_res_block_size=None)
    )
    assert (c.activation.beta, c.activation.linear_beta, c.attn_res_block) == (1.0, None, None)
    assert parse_model_config(kimi_linear(eos_token_id=[5, 6])).eos_ids == (5, 6)
    assert parse_model_config(kimi_linear(), mla_norm_eps=1e-5).mla.norm_eps == 1e-5
    dense = {k: v for k, v in kimi_linear(first_k_dense_replace=27).items() if not k.startswith("num_experts")}
    assert parse_model_config(dense).moe is None
    every_second = parse_model_config(kimi_linear(moe_layer_freq=2, first_k_dense_replace=2)).moe_layers
    assert every_second == tuple(i >= 2 and i % 2 == 0 for i in range(27))


KDA = kimi_linear()["linear_attn_config"]
WRONG = [
    ({"linear_attn_config": KDA | {"kda_layers": KDA["kda_layers"][1:]}}, ["'kda_layers'", "wrong at 1"]),
    ({"linear_attn_config": KDA | {"kda_layers": [*KDA["kda_layers"], 27]}}, ["'full_attn_layers'", "wrong at 27"]),
    ({"linear_attn_config": KDA | {"kda_layers": [0, *KDA["kda_layers"][1:]]}}, ["'kda_layers'", "wrong at 0, 1"]),
    ({"linear_attn_config": KDA | {"kda_layers": [1, 1, *KDA["kda_layers"][1:]]}}, ["'kda_layers'", "wrong at 1"]),
    ({"linear_attn_config": KDA | {"kda_layers": ["1"]}}, ["'kda_layers'", "need a list of whole numbers"]),
    ({"linear_attn_config": KDA | {"num_heads": None}}, ["linear_attn_config", "'num_heads' is missing"]),
    ({"linear_attn_config": KDA | {"head_dim": 1.5}}, ["'head_dim' is 1.5"]),
    ({"linear_attn_config": KDA | {"short_conv_kernel_size": 1}}, ["'short_conv_kernel_size'", "at least 2"]),
    ({"linear_attn_config": KDA | {"gate_lower_bound": 5.0}}, ["'gate_lower_bound' is 5.0", "below 0"]),
    ({"linear_attn_config": KDA | {"use_full_rank_gate": "yes"}}, ["'use_full_rank_gate'", "true or false"]),
    ({"linear_attn_config": [1]}, ["linear_attn_config", "need a JSON object"]),
    ({"linear_attn_config": None}, ["'layer_types' is missing"]),
    ({"hidden_act": "gelu"}, ["'hidden_act' is 'gelu'", "silu, situ"]),
    ({"mla_use_nope": False}, ["'mla_use_nope' is False"]),
    ({"tie_word_embeddings": True}, ["'tie_word_embeddings' is True"]),
    ({"hidden_size": None}, ["'hidden_size' is missing"]),
    ({"hidden_size": "2304"}, ["'hidden_size' is '2304'"]),
    ({"hidden_size": True}, ["'hidden_size' is True"]),
    ({"hidden_size": 0}, ["'hidden_size' is 0", "at least 1"]),
    ({"hidden_size": float("nan")}, ["'hidden_size' is nan"]),
    ({"hidden_size": float("inf")}, ["'hidden_size' is inf"]),
    ({"rms_norm_eps": float("inf")}, ["'rms_norm_eps' is inf"]),
    ({"rms_norm_eps": "1e-5"}, ["'rms_norm_eps' is '1e-5'"]),
    ({"num_hidden_layers": 28}, ["wrong at 28"]),
    ({"num_experts_per_token": 257}, ["'num_experts_per_token' is 257", "num_experts=256"]),
    ({"num_expert_group": 3}, ["'num_expert_group' is 3"]),
    ({"num_expert_group": 2, "topk_group": 3}, ["'num_expert_group' is 2", "topk_group=3"]),
    ({"num_expert_group": 64, "topk_group": 1}, ["'topk_group' is 1", "top-8"]),
    ({"moe_router_activation_func": "tanh"}, ["'moe_router_activation_func' is 'tanh'", "sigmoid, softmax"]),
    ({"mlp_layer_types": ["dense"]}, ["'mlp_layer_types' must hold 27"]),
    ({"dtype": "int8"}, ["'dtype' is 'int8'"]),
    ({"quantization_config": {"format": "int-quantized"}}, ["quantization_config", "'int-quantized'"]),
    ({"quantization_config": "fp8"}, ["quantization_config", "need a JSON object"]),
    (
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        ["'model_type' is 'llama'", "kimi_linear, kimi_k3"],
    ),
]


@pytest.mark.parametrize(("changes", "words"), WRONG, ids=[f"{i}-{next(iter(c))}" for i, (c, _) in enumerate(WRONG)])
def test_what_is_wrong_is_named_in_one_line(changes, words):
    with pytest.raises(ValueError, match="the_file") as caught:
        parse_model_config(kimi_linear(**changes), where="the_file")
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


def test_a_mixture_with_an_unknown_format_is_refused():
    raw = kimi_k3()
    raw["text_config"]["quantization_config"]["config_groups"]["group_1"] = {"format": "float-quantized"}
    with pytest.raises(
        ValueError, match="group_1: field 'format' is 'float-quantized'; accepted: mxfp4-pack-quantized, or"
    ):
        parse_model_config(raw)


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_attention_heads", "kv_lora_rank", "v_head_dim"])
@pytest.mark.parametrize("make", [small_linear, small_k3])
def test_no_required_field_has_a_silent_default(make, field):
    with pytest.raises(ValueError, match=f"'{field}' is missing"):
        parse_model_config(make(**{field: None}))


def test_resaved_layers_must_be_known_and_counted():
    for types in (["linear_attention"], ["sliding_attention"] * 27, "full_attention"):
        with pytest.raises(ValueError, match="'layer_types' must hold 27 of linear_attention, full_attention"):
            parse_model_config(RESAVED | {"layer_types": types})
    with pytest.raises(ValueError, match="'linear_num_heads' is missing"):
        parse_model_config({k: v for k, v in RESAVED.items() if k != "linear_num_heads"})


@pytest.mark.parametrize("eps", [0.0, -1e-6, float("nan")])
def test_a_useless_norm_eps_is_refused(eps):
    with pytest.raises(ValueError, match="mla_norm_eps"):
        parse_model_config(kimi_linear(), mla_norm_eps=eps)


def test_files_that_cannot_be_read(tmp_path):
    file = tmp_path / "config.json"
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        load_model_config(tmp_path)
    for content in (b"{", b"\xff\xfe", b"[]", b"3"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"config\.json: (not valid JSON|need a JSON object)") as caught:
            load_model_config(tmp_path)
        assert "\n" not in str(caught.value)
    file.write_text(json.dumps(kimi_linear()))
    assert load_model_config(tmp_path) == load_model_config(file) == load_model_config(KL_FILE)
