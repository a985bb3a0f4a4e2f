"""Tiny models of both architectures in the released format: config, tokenizer and random weights in seconds."""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from anabranch.config.hf import parse_model_config
from anabranch.config.model import ModelConfig
from anabranch.models.chat import KIMI_LINEAR_TEMPLATE
from anabranch.models.inventory import DTYPES, checkpoint_tensors
from anabranch.models.shards import INDEX_FILE, SINGLE_FILE
from anabranch.models.tokenizer import byte_level_tokenizer, write_tokenizer_files
from anabranch.models.weights import leaf_of
from anabranch.ops.fp8_linear import reference as fp8_linear
from anabranch.ops.fp8_linear.reference import BLOCK, CODES
from anabranch.ops.mxfp4.reference import quantize

# ids 256..271, in the order of the released vocabularies; flag: left out when special tokens are skipped
SPECIALS: dict[str, list[tuple[str, bool]]] = {
    "kl": [
        *((name, True) for name in ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>")),
        *((name, True) for name in ("<|start_header_id|>", "<|end_header_id|>", "[EOT]", "<|im_system|>")),
        *((f"<|tool_{name}|>", False) for name in ("calls_section_begin", "calls_section_end")),
        *((f"<|tool_call_{name}|>", False) for name in ("begin", "argument_begin", "end")),
        ("<|im_middle|>", True),
        ("[PAD]", True),
    ],
    "k3": [
        *((name, True) for name in ("[BOS]", "[EOS]", "<|end_of_msg|>")),
        *((name, False) for name in ("<|open|>", "<|close|>", "<|sep|>")),
        *((name, True) for name in ("[start_header_id]", "[end_header_id]", "[EOT]")),
        *((f"<|media_{name}|>", True) for name in ("begin", "content", "end", "pad")),
        *((name, True) for name in ("<osagent_mode>", "[UNK]", "[PAD]")),
    ],
}
_PREFIX = {"kl": "", "k3": "language_model."}
# standard deviations by the end of a tensor's name; every other one gets 1.6 / sqrt(columns)
_STDS = {"A_log": 0.7, "e_score_correction_bias": 0.3, "embed_tokens": 1.0, "conv1d": 0.6, "res_proj": 0.4}
_IDS = {"bos_token_id": 256, "eos_token_id": 258, "pad_token_id": 271}

# 8 heads of either kind, so that 1, 2, 4 and 8 ranks can share them
_COMMON: dict[str, Any] = {
    **_IDS,
    "first_k_dense_replace": 1,
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "kv_lora_rank": 32,
    "mla_use_nope": True,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 8,
    "num_expert_group": 1,
    "num_experts": 8,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 0,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 16,
    "vocab_size": 272,
}
_LINEAR_ATTENTION = {"head_dim": 16, "num_heads": 8, "short_conv_kernel_size": 4}


def tiny_config(architecture: str, dtype: str = "bfloat16", *, fp8: bool = False) -> dict[str, Any]:
    """config.json of the tiny model "kl" (6 layers) or "k3" (9 layers, residual blocks of 3, MXFP4 experts).

    `fp8`: attention projections in block-FP8.

    ValueError: another architecture or dtype.
    """
    if architecture not in SPECIALS:
        raise ValueError(f"architecture={architecture!r}: accepted are {', '.join(SPECIALS)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: accepted are {', '.join(DTYPES)}")
    raw = _tiny_kl(dtype) if architecture == "kl" else _tiny_k3(dtype)
    if fp8 and architecture == "kl":
        raw["quantization_config"] = _fp8_config()
    elif fp8:
        groups = raw["text_config"]["quantization_config"]
        groups["config_groups"]["group_1"] = _fp8_group()
        groups["ignore"].remove("re:.*self_attn.*")
    return raw


def _tiny_kl(dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": dtype,
        **_COMMON,
        "head_dim": 8,
        "hidden_act": "silu",
        "linear_attn_config": {**_LINEAR_ATTENTION, "full_attn_layers": [4, 6], "kda_layers": [1, 2, 3, 5]},
        "model_max_length": 4096,
        "moe_intermediate_size": 32,
        "num_experts_per_token": 2,
        "num_hidden_layers": 6,
        "num_shared_experts": 1,
        "q_lora_rank": None,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.446,
    }


def _tiny_k3(dtype: str) -> dict[str, Any]:
    text = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": dtype,
        **_COMMON,
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 3,
        "hidden_act": "situ",
        "latent_moe_use_norm": True,
        "linear_attn_config": {
            **_LINEAR_ATTENTION,
            "full_attn_layers": [4, 8, 9],
            "gate_lower_bound": -5.0,
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "use_full_rank_gate": True,
        },
        "max_position_embeddings": 4096,
        "mla_use_output_gate": True,
        # 8 ranks may share one expert and still hold whole MXFP4 groups
        "moe_intermediate_size": 256,
        "num_experts_per_token": 3,
        "num_hidden_layers": 9,
        "num_shared_experts": 2,
        "q_lora_rank": 24,
        "quantization_config": _mxfp4_config(),
        "routed_expert_hidden_size": 32,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": dtype,
        **_IDS,
        "text_config": text,
        "tie_word_embeddings": False,
    }


def _mxfp4_config() -> dict[str, Any]:
    scheme = {"group_size": 32, "num_bits": 4, "scale_dtype": "torch.uint8", "strategy": "group", "type": "float"}
    group = {"format": "mxfp4-pack-quantized", "targets": ["Linear"], "weights": {**scheme, "symmetric": True}}
    return {
        "config_groups": {"group_0": {**group, "input_activations": None, "output_activations": None}},
        "format": "mxfp4-pack-quantized",
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
        ],
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _fp8_config() -> dict[str, Any]:
    """Everything but attention is left out."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["mlp", "block_sparse_moe", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }


def _fp8_group() -> dict[str, Any]:
    scheme = {"block_structure": [BLOCK, BLOCK], "num_bits": 8, "strategy": "block", "symmetric": True, "type": "float"}
    return {"format": "float-quantized", "targets": ["re:.*self_attn.*_proj.*"], "weights": scheme}


def init_checkpoint(
    architecture: str,
    out_dir: str | Path,
    *,
    seed: int = 0,
    dtype: str = "bfloat16",
    shards: int = 1,
    fp8: bool = False,
) -> None:
    """Write a tiny random checkpoint in the released format into `out_dir` (made if needed).

    config.json, generation_config.json, safetensors under the official names, tokenizer files and, for "kl", the chat
    template. The same arguments give the same bytes. Weight files of an earlier checkpoint there are replaced.

    Args:
        architecture: "kl" (Kimi-Linear) or "k3" (Kimi-K3 with MXFP4 experts).
        seed: of the weights.
        dtype: of every tensor that the released checkpoints store in bfloat16.
        shards: weight files; more than one come with an index.
        fp8: attention projections in block-FP8.

    Raises:
        ValueError: another architecture or dtype, or an impossible number of shards.
    """
    raw = tiny_config(architecture, dtype, fp8=fp8)
    config = parse_model_config(raw)
    weights = random_weights(config, seed, DTYPES[dtype])
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    write_weights({_PREFIX[architecture] + name: tensor for name, tensor in weights.items()}, out, shards)
    _write_json(out / "config.json", raw)
    _write_json(out / "generation_config.json", dict(_IDS))
    specials = SPECIALS[architecture]
    write_tokenizer_files(byte_level_tokenizer(specials), specials, out, bos_token="[BOS]", eos_token="[EOS]")
    if architecture == "kl":
        (out / "chat_template.jinja").write_text(KIMI_LINEAR_TEMPLATE, encoding="utf-8")


def random_weights(config: ModelConfig, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every official tensor of `config`, each from a stream of its own (seed and name).

    Magnitudes reach the bends of gates and caps and give the residual softmax a choice. `dtype` takes the place of
    bfloat16.
    """
    weights: dict[str, torch.Tensor] = {}
    for name, spec in checkpoint_tensors(config).items():
        base, _, kind = name.rpartition(".weight_")
        if kind == "packed":
            rows, packed_columns = spec.shape
            weights[name], weights[f"{base}.weight_scale"] = quantize(
                _random(name, (rows, 2 * packed_columns), seed, config)
            )
        elif spec.dtype == CODES:
            values = _random(name, spec.shape, seed, config)
            weights[name], weights[f"{name}_scale_inv"] = fp8_linear.quantize(values)
        elif not kind.startswith("scale"):
            stored = dtype if spec.dtype == torch.bfloat16 else spec.dtype
            weights[name] = _random(name, spec.shape, seed, config).to(stored)
    return weights


def _random(name: str, shape: Sequence[int], seed: int, config: ModelConfig) -> torch.Tensor:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    normal = torch.randn(tuple(shape), generator=generator)
    leaf, softplus = leaf_of(name), config.kda.gate_lower_bound is None
    if leaf == "A_log" and softplus:
        return torch.rand(tuple(shape), generator=generator).mul(15).add(1).log()
    if leaf == "dt_bias":
        return normal - (3 if softplus else 1)
    if leaf.endswith("norm"):
        return 1 + 0.2 * normal
    scale = next((std for end, std in _STDS.items() if leaf.endswith(end)), 1.6 / math.sqrt(shape[-1]))
    return scale * normal


def write_weights(tensors: dict[str, torch.Tensor], out: Path, shards: int = 1) -> None:
    """Write `tensors` into `out` as one safetensors file or as `shards` files with an index, in the given order.

    ValueError: fewer than one shard, or more than tensors.
    """
    if not 1 <= shards <= len(tensors):
        raise ValueError(f"shards={shards}: need 1..{len(tensors)}")
    for stale in (*out.glob("model*.safetensors"), *out.glob(INDEX_FILE)):
        stale.unlink()
    names = list(tensors)
    if shards == 1:
        _write_shard(tensors, names, out / SINGLE_FILE)
        return
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file_name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        held = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        _write_shard(tensors, held, out / file_name)
        weight_map |= dict.fromkeys(held, file_name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(out / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_shard(tensors: dict[str, torch.Tensor], names: Iterable[str], file: Path) -> None:
    save_file({name: tensors[name] for name in names}, file, metadata={"format": "pt"})


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
