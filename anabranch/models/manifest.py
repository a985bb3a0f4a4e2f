"""Holds the tensors of a checkpoint against those of a model, before any of them is read."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from anabranch.config.model import ModelConfig
from anabranch.models.fp8 import CODES, SCALE, official_scale, weight_of_scale
from anabranch.models.inventory import TensorSpec, checkpoint_tensors
from anabranch.models.shards import StoredTensor, has_packed_experts
from anabranch.models.weights import Part, leaf_of, locate, stored_shape
from anabranch.ops.fp8_linear import reference as fp8

_FLOATS = ("BF16", "F16", "F32", "F64")
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
        if _scales_codes(name, stored):
            parts = [part._replace(name=official_scale(part.name)) for part in parts]
        if any(part.name not in tensors for part in parts):
            unexpected.append(name)
        else:
            _claim(name, parts, stored, holders)
            _check_stored(
                name, tensor, needed_shape(tensor.shape, parts, tensors, config), tensors[parts[0].name].dtype
            )
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


def _scales_codes(name: str, stored: Mapping[str, StoredTensor]) -> bool:
    """Whether this tensor holds the scales of FP8 codes, under either spelling."""
    if name.endswith(".input_scale"):
        raise ValueError(f"{stored[name].file}: tensor {name} quantises activations; need weight-only block-FP8")
    weight = stored.get(weight_of_scale(name) or "")
    return weight is not None and weight.dtype.startswith("F8_")


def needed_shape(
    shape: tuple[int, ...], parts: list[Part], tensors: Mapping[str, TensorSpec], config: ModelConfig
) -> tuple[int, ...]:
    """What a tensor that holds `parts` must be shaped like; `shape` itself where it is as good as the official one."""
    needed, heads = stored_shape(parts, tensors), config.kda.heads
    if leaf_of(parts[0].name) == "A_log" and max(shape, default=0) == math.prod(shape) >= heads:
        return shape  # any single run of values that covers the heads
    if parts[0].name.endswith(SCALE) and shape == (needed[0], 1, needed[-1], 1):
        return shape
    return needed


def _check_stored(name: str, tensor: StoredTensor, needed: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != needed:
        raise ValueError(f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, need {list(needed)}")
    accepted = {torch.uint8: ("U8",), fp8.CODES: (CODES,)}.get(dtype, _FLOATS)
    if tensor.dtype not in accepted:
        raise ValueError(f"{tensor.file}: tensor {name} has dtype {tensor.dtype}, need {' or '.join(accepted)}")


def _check_complete(
    tensors: Mapping[str, TensorSpec], holders: Mapping[str, str], stored: Mapping[str, StoredTensor], where: Path
) -> None:
    missing = [name for name in tensors if name not in holders]
    for name in missing:
        base, _, kind = name.rpartition(".weight_")
        halves = {"packed": "weight_scale", "scale": "weight_packed", "scale_inv": "weight"}
        twin = holders.get(f"{base}.{halves.get(kind)}")
        if twin:
            raise ValueError(f"{stored[twin].file}: tensor {twin} is there, but not its other half {name}")
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise ValueError(
            f"{where}: {len(missing)} of {len(tensors)} tensors are missing: {', '.join(missing[:_SHOWN])}{more}"
        )
