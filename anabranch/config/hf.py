"""Reads a Hugging Face config.json (Kimi-Linear, Kimi-K3, or re-saved by transformers) into a ModelConfig."""

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from anabranch.config.model import (
    ActivationConfig,
    Architecture,
    KdaConfig,
    LayerKind,
    MlaConfig,
    ModelConfig,
    MoeConfig,
)
from anabranch.config.quantization import Scheme, schemes

_REQUIRED = object()
_DTYPES = ("bfloat16", "float16", "float32")
_LAYER_TYPES: dict[str, LayerKind] = {"linear_attention": "kda", "full_attention": "mla"}
_FIXED = {"mla_use_nope": True, "tie_word_embeddings": False, "attention_bias": False}


class _Fields:
    """Named access to a config dict: the first spelling found wins, and every complaint names the field."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, dict):
            raise ValueError(f"{where}: need a JSON object, found {type(values).__name__}")
        self.values, self.where = values, where

    def find(self, *names: str, default: Any = _REQUIRED) -> tuple[str, Any]:
        """(spelling found, value); null counts as absent."""
        for name in names:
            if self.values.get(name) is not None:
                return name, self.values[name]
        if default is _REQUIRED:
            raise ValueError(f"{self.where}: field {names[0]!r} is missing")
        return names[0], default

    def get(self, *names: str, default: Any = _REQUIRED) -> Any:
        return self.find(*names, default=default)[1]

    def count(self, *names: str, default: Any = _REQUIRED, least: int = 1) -> Any:
        """A whole number, or the default."""
        name, value = self.find(*names, default=default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
            raise self.wrong(name, value, "need a whole number")
        if value < least:
            raise self.wrong(name, value, f"need at least {least}")
        return int(value)

    def real(self, *names: str, default: Any = _REQUIRED, sign: int = 1) -> Any:
        """A finite number of this sign, or the default."""
        name, value = self.find(*names, default=default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < sign * value < math.inf:
            raise self.wrong(name, value, f"need a number {'above' if sign > 0 else 'below'} 0")
        return float(value)

    def flag(self, *names: str, default: bool) -> bool:
        name, value = self.find(*names, default=default)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "need true or false")
        return value

    def one_of(self, *names: str, legal: Collection[str], default: Any = _REQUIRED) -> Any:
        name, value = self.find(*names, default=default)
        if value not in legal:
            raise self.wrong(name, value, f"accepted: {', '.join(legal)}")
        return value

    def each_of(self, name: str, legal: Collection[str], length: int) -> list[str]:
        """A list of `length` accepted strings."""
        value = self.get(name)
        if not isinstance(value, list) or len(value) != length or any(item not in legal for item in value):
            raise ValueError(f"{self.where}: field {name!r} must hold {length} of {', '.join(legal)}")
        return value

    def counts(self, name: str) -> list[int]:
        """A list of whole numbers; a single one is a list of one, and absent is empty."""
        value = self.get(name, default=[])
        value = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in value):
            raise self.wrong(name, value, "need a list of whole numbers")
        return value

    def inner(self, name: str) -> "_Fields":
        """The fields of a nested object, none if absent."""
        return _Fields(self.get(name, default={}), f"{self.where}: {name}")

    def wrong(self, name: str, value: Any, need: str) -> ValueError:
        return ValueError(f"{self.where}: field {name!r} is {value!r}; {need}")


def load_model_config(path: str | Path, *, mla_norm_eps: float | None = None) -> ModelConfig:
    """Read `config.json`, or the one in a checkpoint directory.

    Raises:
        ValueError: the file is missing, is not JSON, or a field is missing, unknown or inconsistent (named).
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file; need a Hugging Face config.json") from None
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from None
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from None
    return parse_model_config(raw, where=str(file), mla_norm_eps=mla_norm_eps)


def parse_model_config(raw: Any, *, where: str = "config", mla_norm_eps: float | None = None) -> ModelConfig:
    """Parse a config dict; see `load_model_config`. Only the OUTER model_type tells Kimi-K3 from Kimi-Linear."""
    if mla_norm_eps is not None and not 0 < mla_norm_eps < 1:
        raise ValueError(f"mla_norm_eps={mla_norm_eps}: need a number above 0 and below 1")
    outer = _Fields(raw, where)
    architecture = _architecture(outer)
    f = outer.inner("text_config") if architecture == "kimi_k3" and "text_config" in outer.values else outer
    for name, only in _FIXED.items():
        if f.flag(name, default=only) is not only:
            raise f.wrong(name, not only, f"only {str(only).lower()} is implemented")
    layers = f.count("num_hidden_layers")
    kinds = _layer_kinds(f, layers)
    moe_layers = _moe_layers(f, layers)
    formats = _schemes(f, outer)
    config = ModelConfig(
        architecture=architecture,
        hidden_size=f.count("hidden_size"),
        vocab_size=f.count("vocab_size"),
        layer_kinds=kinds,
        moe_layers=moe_layers,
        intermediate_size=f.count("intermediate_size"),
        rms_norm_eps=f.real("rms_norm_eps"),
        activation=_activation(f),
        kda=_kda(f),
        mla=_mla(f, mla_norm_eps),
        moe=_moe(f) if any(moe_layers) else None,
        attn_res_block=f.count("attn_res_block_size", default=None),
        max_context=f.count("model_max_length", "max_position_embeddings", default=1 << 20),
        bos_id=f.count("bos_token_id", default=None, least=0),
        eos_ids=tuple(f.counts("eos_token_id")),
        pad_id=f.count("pad_token_id", default=None, least=0),
        dtype=f.one_of("dtype", "torch_dtype", legal=_DTYPES, default="bfloat16"),
        expert_format="mxfp4" if any(s.format == "mxfp4" for s in formats) else "plain",
    )
    codes = [s for s in formats if s.format == "fp8"]
    fp8 = sorted(name for name in _attention_projections(config) if any(s.covers(name) for s in codes))
    return replace(config, fp8=tuple(fp8))


def _architecture(outer: _Fields) -> Architecture:
    listed = outer.get("architectures", default=[])
    names = [outer.get("model_type", default=None), *(listed if isinstance(listed, list) else [listed])]
    if "kimi_k3" in names or "KimiK3ForConditionalGeneration" in names:
        return "kimi_k3"
    if "kimi_linear" in names or "KimiLinearForCausalLM" in names:
        return "kimi_linear"
    raise outer.wrong("model_type", names[0], "accepted: kimi_linear, kimi_k3")


def _layer_kinds(f: _Fields, layers: int) -> tuple[LayerKind, ...]:
    nested = f.inner("linear_attn_config")
    if "kda_layers" not in nested.values and "full_attn_layers" not in nested.values:
        types = f.each_of("layer_types", _LAYER_TYPES, layers)
        return tuple(_LAYER_TYPES[t] for t in types)
    kda, full = nested.counts("kda_layers"), nested.counts("full_attn_layers")
    seen = Counter(kda + full)
    wrong = sorted(n for n in {*seen, *range(1, layers + 1)} if seen[n] != 1 or not 1 <= n <= layers)
    if wrong:
        raise ValueError(
            f"{nested.where}: fields 'kda_layers' and 'full_attn_layers' must hold each of 1..{layers} exactly once; "
            f"wrong at {', '.join(map(str, wrong[:8]))}"
        )
    return tuple("kda" if i + 1 in set(kda) else "mla" for i in range(layers))


def _moe_layers(f: _Fields, layers: int) -> tuple[bool, ...]:
    if f.get("mlp_layer_types", default=None) is not None:
        return tuple(t == "sparse" for t in f.each_of("mlp_layer_types", ("dense", "sparse"), layers))
    first = f.count("first_k_dense_replace", default=1, least=0)
    every = f.count("moe_layer_freq", default=1)
    return tuple(i >= first and i % every == 0 for i in range(layers))


def _activation(f: _Fields) -> ActivationConfig:
    if f.one_of("hidden_act", legal=("silu", "situ")) == "silu":
        return ActivationConfig(name="silu")
    return ActivationConfig(
        name="situ",
        beta=f.real("activation_situ_beta", default=1.0),
        linear_beta=f.real("activation_situ_linear_beta", default=None),
    )


def _kda(f: _Fields) -> KdaConfig:
    nested = f.inner("linear_attn_config")
    # the outer head_dim is hidden / heads, which no layer uses
    source, heads, dim, conv = (
        (nested, "num_heads", "head_dim", "short_conv_kernel_size")
        if nested.values
        else (f, "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    )
    return KdaConfig(
        heads=source.count(heads),
        head_dim=source.count(dim),
        conv_size=source.count(conv, least=2),
        gate_lower_bound=source.real("gate_lower_bound", default=None, sign=-1),
        full_rank_gate=source.flag("use_full_rank_gate", default=False),
    )


def _mla(f: _Fields, norm_eps: float | None) -> MlaConfig:
    return MlaConfig(
        heads=f.count("num_attention_heads"),
        q_lora_rank=f.count("q_lora_rank", default=None),
        kv_lora_rank=f.count("kv_lora_rank"),
        nope_dim=f.count("qk_nope_head_dim"),
        rope_dim=f.count("qk_rope_head_dim"),
        v_dim=f.count("v_head_dim"),
        output_gate=f.flag("mla_use_output_gate", default=False),
        norm_eps=f.real("mla_norm_eps", default=1e-6) if norm_eps is None else norm_eps,
    )


def _moe(f: _Fields) -> MoeConfig:
    experts = f.count("num_experts", "n_routed_experts", "num_local_experts")
    top_k = f.count("num_experts_per_token", "num_experts_per_tok")
    groups = f.count("num_expert_group", "n_group", default=1)
    top_groups = f.count("topk_group", default=1)
    if top_k > experts:
        raise ValueError(f"{f.where}: field 'num_experts_per_token' is {top_k}; need at most num_experts={experts}")
    if experts % groups or top_groups > groups:
        raise ValueError(
            f"{f.where}: field 'num_expert_group' is {groups} with topk_group={top_groups}; "
            f"need a divisor of num_experts={experts} and topk_group at most it"
        )
    if top_k > experts // groups * top_groups or (groups > 1 and experts // groups < 2):
        raise ValueError(f"{f.where}: field 'topk_group' is {top_groups}; too few experts remain for top-{top_k}")
    return MoeConfig(
        experts=experts,
        top_k=top_k,
        shared_experts=f.count("num_shared_experts", "n_shared_experts", default=0, least=0),
        intermediate_size=f.count("moe_intermediate_size"),
        groups=groups,
        top_groups=top_groups,
        scoring=f.one_of("moe_router_activation_func", legal=("sigmoid", "softmax"), default="sigmoid"),
        renormalize=f.flag("moe_renormalize", "norm_topk_prob", default=True),
        scaling=f.real("routed_scaling_factor", default=1.0),
        latent_size=f.count("routed_expert_hidden_size", default=None),
        latent_norm=f.flag("latent_moe_use_norm", default=False),
    )


def _schemes(f: _Fields, outer: _Fields) -> list[Scheme]:
    source = f if f.get("quantization_config", default=None) is not None else outer
    quantization = source.inner("quantization_config")
    return schemes(quantization.values, quantization.where) if quantization.values else []


def _attention_projections(config: ModelConfig) -> Iterator[str]:
    """Official names of the linear modules of every attention layer."""
    gate = ("g_proj",) if config.kda.full_rank_gate else ("g_a_proj", "g_b_proj")
    query = ("q_a_proj", "q_b_proj") if config.mla.q_lora_rank else ("q_proj",)
    latent = ("kv_a_proj_with_mqa", "kv_b_proj", *(("g_proj",) if config.mla.output_gate else ()))
    of_kind = {
        "kda": ("q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", *gate, "o_proj"),
        "mla": (*query, *latent, "o_proj"),
    }
    for i, kind in enumerate(config.layer_kinds):
        yield from (f"model.layers.{i}.self_attn.{name}" for name in of_kind[kind])
