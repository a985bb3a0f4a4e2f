"""The trained model as a checkpoint in the Hugging Face layout, with tokenizer and model card."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from anabranch.models.inventory import checkpoint_tensors
from anabranch.models.tiny import SPECIALS, write_weights
from anabranch.models.tokenizer import byte_level_tokenizer, write_tokenizer_files

from .config import EOS
from .model import Trainable

_SPECIALS = SPECIALS["k3"]


def export(model: Trainable, raw: Mapping[str, Any], out: Path) -> None:
    """Write weights, config and tokenizer of `model`, whose config.json is `raw`, into `out` (made if needed).

    ValueError: a weight is not finite; nothing is written then.
    """
    tensors = official_tensors(model)
    out.mkdir(parents=True, exist_ok=True)
    write_weights(tensors, out)
    ids = {key: raw[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in (("config.json", raw), ("generation_config.json", ids)):
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer = byte_level_tokenizer(_SPECIALS)
    write_tokenizer_files(tokenizer, _SPECIALS, out, bos_token="[BOS]", eos_token=_SPECIALS[EOS - 256][0])


def official_tensors(model: Trainable) -> dict[str, torch.Tensor]:
    """Official name -> tensor as a Kimi-K3 checkpoint stores it: dtype, shape, A_log padded with zeros."""
    state, found = model.state_dict(), {}
    for name, spec in checkpoint_tensors(model.config).items():
        tensor = state[name].detach().to("cpu", spec.dtype)
        if not torch.isfinite(tensor).all():
            raise ValueError(f"tensor {name} has values that are not finite")
        missing = math.prod(spec.shape) - tensor.numel()
        if name.endswith("A_log") and missing > 0:
            tensor = torch.cat([tensor.flatten(), tensor.new_zeros(missing)])
        found[f"language_model.{name}"] = tensor.reshape(spec.shape).contiguous()
    return found
