"""PEFT LoRA adapters on attention projections: read, held against the model, and attached to the layers of a rank.

y = W x becomes y = W x + s B (A x) with A [r, in] and B [out, r]; s is lora_alpha / r, or / sqrt(r) for rsLoRA. The
base weights stay as they are. A merged GEMM would bypass the adapter: the plan keeps adapted projections out of merges.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from anabranch.config.model import ModelConfig
from anabranch.fusion.buffer import MergedWeight
from anabranch.fusion.product import Adapter
from anabranch.layers.linear import Linear
from anabranch.models.inventory import TensorSpec, checkpoint_tensors
from anabranch.models.kimi import KimiForCausalLM
from anabranch.models.shards import StoredTensor, open_shard, read_header
from anabranch.models.weights import RULES, leaf_of, locate, rank_of, shard

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
# kv_b_proj is multiplied in two forms: merge its adapter into the checkpoint instead
TARGETS = (
    *("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
)
_PREFIX = "base_model.model."
# what would change the formula, with the one value under which it does not
_PLAIN = {"bias": "none", "use_dora": False, "modules_to_save": None, "fan_in_fan_out": False}
_PLAIN |= {"rank_pattern": {}, "alpha_pattern": {}, "layer_replication": None, "lora_bias": False}
_OTHER_BASES = ("pissa", "olora", "corda", "loftq")
_FLOATS = ("BF16", "F16", "F32")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraAdapter:
    """An adapter that fits a model: its file, its scale, and for each official module name the names of A and B."""

    file: Path
    rank: int
    scale: float
    pairs: Mapping[str, tuple[str, str]]

    @property
    def modules(self) -> tuple[str, ...]:
        """Official names of the adapted modules."""
        return tuple(self.pairs)


def read_adapter(path: str | Path, config: ModelConfig) -> LoraAdapter:
    """Check the adapter directory `path` against a model; no weight is read yet.

    Raises:
        ValueError: in one line: a missing or damaged file; another kind of adapter, or an option that changes the
            formula; a target that is not an attention projection of this model; half of a pair; a wrong shape, rank
            or dtype, which is what an adapter of another base model shows.
    """
    directory = Path(path)
    settings = _read_settings(directory / CONFIG_FILE)
    rank, scale = _rank_and_scale(settings, directory / CONFIG_FILE)
    file = directory / WEIGHTS_FILE
    stored = dict(read_header(file))
    if not stored:
        raise ValueError(f"{file}: holds no tensors")
    found: dict[str, dict[str, str]] = {}
    tensors = checkpoint_tensors(config)
    for name in stored:
        module, side = _module_of(name, config, tensors, file)
        if side in found.setdefault(module, {}):
            raise ValueError(f"{file}: {found[module][side]} and {name} are the same")
        found[module][side] = name
    for module, pair in found.items():
        _check_pair(file, module, pair, stored, tensors[f"{module}.weight"], rank)
    pairs = {module: (pair["A"], pair["B"]) for module, pair in found.items()}
    return LoraAdapter(file=file, rank=rank, scale=scale, pairs=pairs)


def attach(model: KimiForCausalLM, adapter: LoraAdapter) -> int:
    """Give `model`, built with `adapted=adapter.modules`, this rank's part of every pair; returns how many it holds.

    Raises:
        ValueError: a value is NaN or infinite in the model's dtype, or the file cannot be read.
    """
    held = 0
    with open_shard(adapter.file) as file:
        for module, names in adapter.pairs.items():
            _, _, layer, attention, leaf = module.split(".")
            if layer in model.model.layers:
                owner = getattr(model.model.layers[layer], attention)
                a, b = (_part(model, leaf, side, file.get_tensor(n)) for side, n in zip("AB", names, strict=True))
                for name, part in zip(names, (a, b), strict=True):
                    if not part.isfinite().all():
                        raise ValueError(f"{adapter.file}: tensor {name} holds a value that is NaN or infinite")
                _adapt(owner, leaf, Adapter(a, b, adapter.scale))
                held += 1
    return held


def _adapt(attention: torch.nn.Module, leaf: str, adapter: Adapter) -> None:
    for child in attention.children():
        if isinstance(child, MergedWeight) and leaf in (segment.name for segment in child.segments):
            child.adapt(leaf, adapter)
            return
    linear = getattr(attention, leaf)
    assert isinstance(linear, Linear)
    linear.adapter = adapter


def _part(model: KimiForCausalLM, leaf: str, side: str, full: torch.Tensor) -> torch.Tensor:
    """B is divided as the rows of W, A as its columns; where W is divided in the other dimension every rank has all."""
    rule = RULES[leaf]
    if rule.group is not None and (rule.dim == 0) == (side == "B"):
        full = shard(full, rule, *rank_of(rule, model.parallel))
    return full.to(model.dtype).to(next(model.parameters()).device).contiguous()


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file; need a PEFT adapter directory") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{file}: need a JSON object, found {type(settings).__name__}")
    if settings.get("peft_type") != "LORA":
        raise ValueError(f"{file}: field 'peft_type' is {settings.get('peft_type')!r}; accepted: LORA")
    for name, only in _PLAIN.items():
        if (value := settings.get(name)) not in (None, only):
            raise ValueError(f"{file}: field {name!r} is {value!r}; only {only!r} is implemented")
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_OTHER_BASES):
        raise ValueError(
            f"{file}: field 'init_lora_weights' is {start!r}, which changes the base weights; convert it to LoRA"
        )
    targets = settings.get("target_modules")
    if isinstance(targets, list) and (wrong := [t for t in targets if t not in TARGETS]):
        raise ValueError(f"{file}: target_modules holds {wrong[0]!r}; accepted are {', '.join(TARGETS)}")
    return settings


def _rank_and_scale(settings: Mapping[str, Any], file: Path) -> tuple[int, float]:
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"{file}: field 'r' is {rank!r}; need a whole number from 1")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ValueError(f"{file}: field 'lora_alpha' is {alpha!r}; need a number")
    return rank, alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank


def _module_of(name: str, config: ModelConfig, known: Mapping[str, TensorSpec], file: Path) -> tuple[str, str]:
    """(official module name, "A" or "B") of a stored tensor such as base_model.model.<module>.lora_A.weight."""
    plain = name.removeprefix(_PREFIX)
    module, _, end = plain.partition(".lora_")
    side = {"A.weight": "A", "A.default.weight": "A", "B.weight": "B", "B.default.weight": "B"}.get(end)
    if plain == name or side is None:
        raise ValueError(f"{file}: unexpected tensor {name}; need {_PREFIX}<module>.lora_A.weight and lora_B.weight")
    parts = locate(f"{module}.weight", config)
    if isinstance(parts, str) or len(parts) != 1 or parts[0].name not in known:
        raise ValueError(f"{file}: tensor {name} adapts {module}, which this model does not have")
    official = parts[0].name.removesuffix(".weight")
    if ".self_attn." not in official or leaf_of(parts[0].name) not in TARGETS:
        raise ValueError(f"{file}: tensor {name}: adapters are accepted on {', '.join(TARGETS)}")
    return official, side


def _check_pair(
    file: Path, module: str, pair: Mapping[str, str], stored: Mapping[str, StoredTensor], spec: TensorSpec, rank: int
) -> None:
    if len(pair) == 1:
        [(side, name)] = pair.items()
        raise ValueError(f"{file}: tensor {name} is there, but not lora_{'B' if side == 'A' else 'A'} of {module}")
    out, inner = spec.shape
    for side, needed in (("A", (rank, inner)), ("B", (out, rank))):
        name, tensor = pair[side], stored[pair[side]]
        if tensor.shape != needed:
            raise ValueError(f"{file}: tensor {name} has shape {list(tensor.shape)}, need {list(needed)}")
        if tensor.dtype not in _FLOATS:
            raise ValueError(f"{file}: tensor {name} has dtype {tensor.dtype}, need {' or '.join(_FLOATS)}")
