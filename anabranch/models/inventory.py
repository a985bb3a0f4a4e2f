"""Every text tensor of an official checkpoint: name, stored shape, stored dtype, and the counts that follow."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from anabranch.config.model import ModelConfig
from anabranch.ops.fp8_linear.reference import CODES, blocks
from anabranch.ops.mxfp4.reference import GROUP

# model dtypes, as config.json and options name them
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_BF16, _FP32, _U8, _FP8 = torch.bfloat16, torch.float32, torch.uint8, CODES
_A_LOG_ALIGN = 128  # Kimi-K3 stores 128 values for its 96 heads


class TensorSpec(NamedTuple):
    """How a checkpoint stores one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


_Entries = Iterator[tuple[str, TensorSpec]]


def checkpoint_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Official name -> spec of every text tensor, unsharded (model_spec section 10).

    Names are those of the state dict; a Kimi-K3 checkpoint puts `language_model.` before each. Experts are packed or
    plain by `config.expert_format`; a weight in `config.fp8` comes with the scales of its blocks.
    """
    table, hidden = (config.vocab_size, config.hidden_size), (config.hidden_size,)
    tensors = {"model.embed_tokens.weight": TensorSpec(table, _BF16)}
    for i in range(config.layers):
        tensors |= {f"model.layers.{i}.{name}": spec for name, spec in _layer(config, i)}
    if config.attn_res_block is not None:
        tensors["model.output_attn_res_norm.weight"] = TensorSpec(hidden, _BF16)
        tensors["model.output_attn_res_proj.weight"] = TensorSpec((1, *hidden), _BF16)
    tensors["model.norm.weight"] = TensorSpec(hidden, _BF16)
    tensors["lm_head.weight"] = TensorSpec(table, _BF16)
    return _with_fp8(tensors, frozenset(config.fp8))


def _with_fp8(tensors: dict[str, TensorSpec], modules: frozenset[str]) -> dict[str, TensorSpec]:
    if not modules:
        return tensors
    result = {}
    for name, spec in tensors.items():
        module, inside = name.removesuffix(".weight"), name.removesuffix(".weight") in modules
        result[name] = TensorSpec(spec.shape, _FP8) if inside else spec
        if inside:
            rows, columns = spec.shape
            result[f"{module}.weight_scale_inv"] = TensorSpec((blocks(rows), blocks(columns)), _FP32)
    return result


def count_parameters(config: ModelConfig) -> int:
    """Elements of all text tensors, an MXFP4 weight counted as what it unpacks to and scales not at all."""
    # elements that one stored element stands for
    worth = {"weight_packed": 2, "weight_scale": 0, "weight_scale_inv": 0}
    tensors = checkpoint_tensors(config).items()
    return sum(worth.get(name.rpartition(".")[2], 1) * math.prod(spec.shape) for name, spec in tensors)


def _layer(config: ModelConfig, index: int) -> _Entries:
    hidden = (config.hidden_size,)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{norm}.weight", TensorSpec(hidden, _BF16)
    if config.attn_res_block is not None:
        for read in ("self_attention_res", "mlp_res"):
            yield f"{read}_norm.weight", TensorSpec(hidden, _BF16)
            yield f"{read}_proj.weight", TensorSpec((1, *hidden), _BF16)
    attention = _kda if config.layer_kinds[index] == "kda" else _mla
    for name, spec in attention(config):
        yield f"self_attn.{name}", spec
    if config.moe_layers[index]:
        for name, spec in _moe(config):
            yield f"block_sparse_moe.{name}", spec
    else:
        for name, spec in _mlp(config, config.intermediate_size):
            yield f"mlp.{name}", spec


def _linear(name: str, rows: int, columns: int) -> tuple[str, TensorSpec]:
    return f"{name}.weight", TensorSpec((rows, columns), _BF16)


def _vectors(config: ModelConfig) -> torch.dtype:
    """Kimi-K3 stores taps, the head norm and the router's bias in fp32, Kimi-Linear in bf16."""
    return _FP32 if config.is_k3 else _BF16


def _kda(config: ModelConfig) -> _Entries:
    kda, hidden = config.kda, config.hidden_size
    for name in ("q", "k", "v"):
        yield _linear(f"{name}_proj", kda.width, hidden)
        yield f"{name}_conv1d.weight", TensorSpec((kda.width, 1, kda.conv_size), _vectors(config))
    padded = -(-kda.heads // _A_LOG_ALIGN) * _A_LOG_ALIGN
    yield "A_log", TensorSpec((padded,) if config.is_k3 else (1, 1, kda.heads, 1), _FP32)
    yield "dt_bias", TensorSpec((kda.width,), _FP32)
    yield _linear("f_a_proj", kda.head_dim, hidden)
    yield _linear("f_b_proj", kda.width, kda.head_dim)
    yield _linear("b_proj", kda.heads, hidden)
    if kda.full_rank_gate:
        yield _linear("g_proj", kda.width, hidden)
    else:
        yield _linear("g_a_proj", kda.head_dim, hidden)
        yield _linear("g_b_proj", kda.width, kda.head_dim)
    yield "o_norm.weight", TensorSpec((kda.head_dim,), _vectors(config))
    yield _linear("o_proj", hidden, kda.width)


def _mla(config: ModelConfig) -> _Entries:
    mla, hidden = config.mla, config.hidden_size
    query, value = mla.heads * mla.qk_dim, mla.heads * mla.v_dim
    if mla.q_lora_rank is None:
        yield _linear("q_proj", query, hidden)
    else:
        yield _linear("q_a_proj", mla.q_lora_rank, hidden)
        yield "q_a_layernorm.weight", TensorSpec((mla.q_lora_rank,), _BF16)
        yield _linear("q_b_proj", query, mla.q_lora_rank)
    yield _linear("kv_a_proj_with_mqa", mla.latent_dim, hidden)
    yield "kv_a_layernorm.weight", TensorSpec((mla.kv_lora_rank,), _BF16)
    yield _linear("kv_b_proj", mla.heads * (mla.nope_dim + mla.v_dim), mla.kv_lora_rank)
    if mla.output_gate:
        yield _linear("g_proj", value, hidden)
    yield _linear("o_proj", hidden, value)


def _mlp(config: ModelConfig, inner: int) -> _Entries:
    yield _linear("gate_proj", inner, config.hidden_size)
    yield _linear("up_proj", inner, config.hidden_size)
    yield _linear("down_proj", config.hidden_size, inner)


def _moe(config: ModelConfig) -> _Entries:
    assert config.moe is not None
    moe, hidden = config.moe, config.hidden_size
    yield _linear("gate", moe.experts, hidden)
    yield "gate.e_score_correction_bias", TensorSpec((moe.experts,), _vectors(config))
    inner, one = moe.intermediate_size, list(_expert(config, moe.latent_size or hidden))
    for expert in range(moe.experts):
        for name, spec in one:
            yield f"experts.{expert}.{name}", spec
    if moe.shared_experts:
        for name, spec in _mlp(config, inner * moe.shared_experts):
            yield f"shared_experts.{name}", spec
    if moe.latent_size:
        yield _linear("routed_expert_down_proj", moe.latent_size, hidden)
        yield _linear("routed_expert_up_proj", hidden, moe.latent_size)
        if moe.latent_norm:
            yield "routed_expert_norm.weight", TensorSpec((moe.latent_size,), _BF16)


def _expert(config: ModelConfig, width: int) -> _Entries:
    assert config.moe is not None
    inner = config.moe.intermediate_size
    for name, rows, columns in (("w1", inner, width), ("w2", width, inner), ("w3", inner, width)):
        if config.expert_format == "plain":
            yield _linear(name, rows, columns)
        else:
            yield f"{name}.weight_packed", TensorSpec((rows, columns // 2), _U8)
            yield f"{name}.weight_scale", TensorSpec((rows, columns // GROUP), _U8)
