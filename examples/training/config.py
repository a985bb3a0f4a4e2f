"""config.json of the small model: every feature of Kimi-K3, 8 million parameters, bytes as its vocabulary."""

from typing import Any

from anabranch.models.tiny import tiny_config

EOS = 258  # <|end_of_msg|>, which ends every document

# three residual blocks of three layers; layer kinds as at the end of Kimi-K3: every fourth is MLA, and the last one
_TEXT: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "kv_lora_rank": 128,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 9],
        "gate_lower_bound": -5.0,
        "head_dim": 64,
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "num_heads": 4,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    },
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "routed_expert_hidden_size": 128,
    "v_head_dim": 64,
}


def small_config() -> dict[str, Any]:
    """The small model; its experts are plain bfloat16."""
    return _with(_TEXT)


def minimal_config() -> dict[str, Any]:
    """The same features in 125 thousand parameters, for tests on a CPU."""
    linear = _TEXT["linear_attn_config"] | {"head_dim": 16, "num_heads": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "kv_lora_rank": 16, "q_lora_rank": 16, "v_head_dim": 16}
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "routed_expert_hidden_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
    return _with(_TEXT | sizes | experts | heads | {"linear_attn_config": linear})


def _with(changes: dict[str, Any]) -> dict[str, Any]:
    raw = tiny_config("k3")
    text = raw["text_config"] | changes
    del text["quantization_config"]
    return raw | {"text_config": text}
