"""PEFT LoRA adapters on disk, and what a model would be whose weights they were merged into."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from anabranch.config.model import ModelConfig
from anabranch.models.inventory import checkpoint_tensors

Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]


def random_pairs(
    config: ModelConfig, leaves: Sequence[str], rank: int = 4, layers: Sequence[int] | None = None
) -> Pairs:
    """Official module name -> (A, B) for the attention projections called one of `leaves`."""
    generator, pairs = torch.Generator().manual_seed(7), {}
    for name, spec in checkpoint_tensors(config).items():
        parts = name.split(".")
        wanted = ".self_attn." in name and parts[-1] == "weight" and parts[-2] in leaves
        if wanted and (layers is None or int(parts[2]) in layers):
            out, inner = spec.shape
            a, b = (torch.randn(s, generator=generator, dtype=torch.float32) for s in ((rank, inner), (out, rank)))
            pairs[name.removesuffix(".weight")] = (a / inner**0.5, b / rank**0.5)
    return pairs


def write_adapter(
    pairs: Pairs, out: Path, *, prefix: str = "base_model.model.", infix: str = "", **changes: Any
) -> Path:
    """An adapter directory as PEFT writes it; `changes` go into adapter_config.json."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for module, (a, b) in pairs.items():
        tensors |= {f"{prefix}{module}.lora_A{infix}.weight": a, f"{prefix}{module}.lora_B{infix}.weight": b}
    save_file(tensors, out / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": next(iter(pairs.values()))[0].shape[0] if pairs else 1,
        "lora_alpha": 6,
        "target_modules": sorted({module.split(".")[-1] for module in pairs}),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "fan_in_fan_out": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "somewhere/else",
    }
    (out / "adapter_config.json").write_text(json.dumps(settings | changes))
    return out


def merged(weights: dict[str, torch.Tensor], pairs: Pairs, alpha: float = 6, rslora: bool = False):
    """Weights with W + s B A in place of W, at the precision of W or better."""
    result = dict(weights)
    for module, (a, b) in pairs.items():
        name, rank = f"{module}.weight", a.shape[0]
        scale = alpha / (math.sqrt(rank) if rslora else rank)
        result[name] = weights[name].double() + scale * b.double() @ a.double()
    return result
