"""The two released config.json files as dicts, and small models of the same make."""

import json
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parents[1] / "data" / "configs"
KL_FILE = DIRECTORY / "kimi_linear_48b_config.json"
K3_FILE = DIRECTORY / "kimi_k3_config.json"


def kimi_linear(**changes: Any) -> dict[str, Any]:
    return json.loads(KL_FILE.read_text()) | changes


def kimi_k3(**changes: Any) -> dict[str, Any]:
    """Kimi-K3; `changes` go into its text_config."""
    raw = json.loads(K3_FILE.read_text())
    raw["text_config"] |= changes
    return raw


_SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "vocab_size": 96,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_attention_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_SMALL_KDA = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4, "head_dim": 8}


def small_linear(**changes: Any) -> dict[str, Any]:
    """Kimi-Linear with 4 layers and 4 heads."""
    raw = kimi_linear()
    return raw | _SMALL | {"linear_attn_config": raw["linear_attn_config"] | _SMALL_KDA} | changes


def small_k3(**changes: Any) -> dict[str, Any]:
    """Kimi-K3 with 4 layers, 4 heads and packed experts; `changes` go into its text_config."""
    kda = kimi_k3()["text_config"]["linear_attn_config"] | _SMALL_KDA
    small = _SMALL | {"q_lora_rank": 24, "routed_expert_hidden_size": 32, "attn_res_block_size": 2}
    return kimi_k3(**(small | {"linear_attn_config": kda} | changes))
