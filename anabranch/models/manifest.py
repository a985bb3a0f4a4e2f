"""Holds the tensors of a checkpoint against those of a model, before any of them is read."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from anabranch.config.model import ModelConfig
from anabranch.models.inventory import TensorSpec, checkpoint_tensors
from anabranch.models.shards import StoredTensor, has_packed_experts
from anabranch.models.weights import Part, leaf_of, locate, stored_shape

_FLOATS = ("BF16", "F16", "F32", "F64")
_SCALES = (".weight_scale", ".weight_scale_inv", ".input_scale")
_SHOWN = 3  # names in a message before "and N more"

# stored name and the official tensors in it, for each tensor that a file is read for
Reading = list[tuple[str, list[Part]]]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What each file is to be read for, and how many of its tensors are not."""

    files: dict[Path, Reading]
    vision: int
    ignored: int


def make_manifest(stored: Mapping[str, StoredTensor], config: ModelConfig, where: Path) -> Manifest:
    """Match the tensors found at `where` with the model's, name by name; every official tensor must be there once.

    Raises:
        ValueError: in one line with tensor and file: experts in another format than the model's, a quantisation that
            is not supported, a tensor that is missing, unexpected, there twice, or of the wrong shape or dtype.
    """
    tensors = checkpoint_tensors(config)
    found = "mxfp4" if has_packed_experts(stored) else "plain"
    if config.moe and found != config.expert_format:
        raise ValueError(f"{where}: the experts are {found}, but the model was built for {config.expert_format} ones")
    files: dict[Path, Reading] = {}
    skipped: Counter[str] = Counter()
    holders: dict[str, str] = {}
    unexpected: list[str] = []
    for name, tensor in stored.items():
        parts = locate(name, config)
        if isinstance(parts, str):
            skipped[parts] += 1
            continue
        _check_not_fp8(name, stored)
        if any(part.name not in tensors for part in parts):
            unexpected.append(name)
        else:
            _claim(name, parts, stored, holders)
            _check_stored(name, tensor, _needed_shape(tensor, parts, tensors, config), tensors[parts[0].name].dtype)
            files.setdefault(tensor.file, []).append((name, parts))
    if unexpected:
        more = f" and {len(unexpected) - 1} more" if len(unexpected) > 1 else ""
        raise ValueError(f"{stored[unexpected[0]].file}: unexpected tensor {unexpected[0]}{more}")
    _check_complete(tensors, holders, stored, where)
    return Manifest(files, skipped["vision"], skipped["ignored"])


def _claim(name: str, parts: list[Part], stored: Mapping[str, StoredTensor], holders: dict[str, str]) -> None:
    for part in parts:
        other = holders.setdefault(part.name, name)
        if other != name:
            raise ValueError(
                f"{stored[name].file}: tensor {name} is in {stored[other].file.name} as well, under the name {other}"
            )


def _check_not_fp8(name: str, stored: Mapping[str, StoredTensor]) -> None:
    tensor = stored[name]
    scale = name.endswith(_SCALES) and f"{name.rpartition('.')[0]}.weight" in stored
    if scale or tensor.dtype.startswith("F8_"):
        what = "attention" if ".self_attn." in name else "weights"
        raise ValueError(
            f"{tensor.file}: tensor {name} ({tensor.dtype}): block-FP8 {what} is not supported yet; "
            f"need {', '.join(_FLOATS)}, or MXFP4 experts"
        )


def _needed_shape(
    tensor: StoredTensor, parts: list[Part], tensors: Mapping[str, TensorSpec], config: ModelConfig
) -> tuple[int, ...]:
    needed, heads = stored_shape(parts, tensors), config.kda.heads
    if leaf_of(parts[0].name) == "A_log":
        # any single run of values that covers the heads is as good as the official one
        run = max(tensor.shape, default=0)
        return tensor.shape if run == math.prod(tensor.shape) >= heads else needed
    return needed


def _check_stored(name: str, tensor: StoredTensor, needed: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != needed:
        raise ValueError(f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, need {list(needed)}")
    accepted = ("U8",) if dtype == torch.uint8 else _FLOATS
    if tensor.dtype not in accepted:
        raise ValueError(f"{tensor.file}: tensor {name} has dtype {tensor.dtype}, need {' or '.join(accepted)}")


def _check_complete(
    tensors: Mapping[str, TensorSpec], holders: Mapping[str, str], stored: Mapping[str, StoredTensor], where: Path
) -> None:
    missing = [name for name in tensors if name not in holders]
    for name in missing:
        base, _, kind = name.rpartition(".weight_")
        twin = holders.get(f"{base}.weight_{'scale' if kind == 'packed' else 'packed'}")
        if twin:
            raise ValueError(f"{stored[twin].file}: tensor {twin} is there, but not its other half {name}")
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise ValueError(
            f"{where}: {len(missing)} of {len(tensors)} tensors are missing: {', '.join(missing[:_SHOWN])}{more}"
        )
