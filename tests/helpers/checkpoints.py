"""Tiny checkpoints on disk, and the spellings that other tools give their tensors."""

import copy
import functools
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from anabranch.config.hf import parse_model_config
from anabranch.config.model import ModelConfig
from anabranch.models.kimi import KimiForCausalLM
from anabranch.models.tiny import random_weights, tiny_config, write_weights
from anabranch.ops.fp8_linear.reference import dequantize

Tensors = dict[str, torch.Tensor]


def raw_config(architecture: str, **changes: Any) -> dict[str, Any]:
    """config.json of a tiny model with changed text fields; None removes a field."""
    raw = copy.deepcopy(tiny_config(architecture))
    text = raw.get("text_config", raw)
    for name, value in changes.items():
        text[name] = value
        if value is None:
            del text[name]
    return raw


def config_of(architecture: str, **changes: Any) -> ModelConfig:
    return parse_model_config(raw_config(architecture, **changes))


def official(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """Random tensors under the names that the released checkpoint of this architecture uses."""
    prefix = "language_model." if config.is_k3 else ""
    return {prefix + name: tensor.clone() for name, tensor in weights_of(config, seed, dtype).items()}


# made once a process; nobody may write into them
weights_of = functools.cache(random_weights)


def write(tensors: Tensors, out: Path, raw: dict[str, Any] | None = None, shards: int = 1) -> Path:
    """A checkpoint directory of exactly these tensors."""
    out.mkdir(parents=True, exist_ok=True)
    if raw is not None:
        (out / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    write_weights(tensors, out, shards)
    return out


def read(directory: Path) -> Tensors:
    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def filled(config: ModelConfig, weights: Tensors, dtype: torch.dtype = torch.float32) -> KimiForCausalLM:
    """The one-rank model holding `weights` (state-dict names), filled without any loader code."""
    model = KimiForCausalLM(config, dtype=dtype)
    for name, view in model.state_dict().items():
        full = weights[name]
        view.copy_(full.flatten()[: config.kda.heads] if name.endswith("A_log") else full)
    return model


def same(a: KimiForCausalLM, b: KimiForCausalLM) -> bool:
    """Equal names, dtypes and bits."""
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def without_model(tensors: Tensors) -> Tensors:
    """`language_model.layers.` and so on: the prefix without `model.`."""
    return {
        f"language_model.{name.removeprefix('language_model.').removeprefix('model.')}": t
        for name, t in tensors.items()
    }


def swapped_ffn(tensors: Tensors) -> Tensors:
    """Dense layers called `block_sparse_moe`, MoE layers called `mlp`."""
    other = {"mlp": "block_sparse_moe", "block_sparse_moe": "mlp"}
    return {re.sub(r"\.(mlp|block_sparse_moe)\.", lambda m: f".{other[m[1]]}.", name): t for name, t in tensors.items()}


def in_memory(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The names that transformers gives its live parameters, merged convolutions and stacked experts included."""
    assert config.moe
    result = {}
    for name, tensor in tensors.items():
        name = name.replace("block_sparse_moe.", "mlp.")
        if (found := re.search(r"experts\.(\d+)\.w\d", name)) or (found := re.search(r"([qkv])_conv1d", name)):
            if found[0] == "q_conv1d":
                parts = [tensors[name.replace("q_conv1d", f"{n}_conv1d")] for n in "qkv"]
                result[name.replace("q_conv1d", "conv1d")] = torch.cat(parts)
            elif found[0] == "experts.0.w1":
                each = [[tensors[_expert(name, e, n)] for e in range(config.moe.experts)] for n in (1, 2, 3)]
                base = name.removesuffix("0.w1.weight")
                result[f"{base}gate_up_proj"] = torch.cat([torch.stack(each[0]), torch.stack(each[2])], 1)
                result[f"{base}down_proj"] = torch.stack(each[1])
            continue
        result[re.sub(r"self_attn\.(f_a_proj|f_b_proj|dt_bias|A_log)", r"self_attn.forget_gate.\1", name)] = tensor
    return result


def _expert(name: str, expert: int, part: int) -> str:
    return name.replace("mlp.experts.0.w1", f"block_sparse_moe.experts.{expert}.w{part}")


def raw_fp8(architecture: str, **changes: Any) -> dict[str, Any]:
    """config.json of the tiny model with attention in block-FP8."""
    raw = tiny_config(architecture, fp8=True)
    raw.get("text_config", raw).update(changes)
    return raw


def dequantized(weights: Tensors) -> Tensors:
    """The plain twin: every block-FP8 weight as the fp32 values that it stands for."""
    scales = {name.removesuffix("_scale_inv"): t for name, t in weights.items() if name.endswith(".weight_scale_inv")}
    plain = {name: t for name, t in weights.items() if not name.endswith(".weight_scale_inv")}
    return plain | {name: dequantize(plain[name], scale) for name, scale in scales.items()}


def with_exact_scales(weights: Tensors) -> Tensors:
    """Scales rounded to powers of two, so that bf16 holds every dequantised value exactly."""
    return {
        name: torch.exp2(t.log2().round()) if name.endswith(".weight_scale_inv") else t for name, t in weights.items()
    }
