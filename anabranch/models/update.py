"""New weights for a model that is loaded and running: checked as a whole, then written into the live storage.

Nothing is allocated anew, so captured graphs, merged buffers and every projection path see the new values. Block-FP8
weights take codes with their scales, or plain values that are quantised again; weights that are held plain take either.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from anabranch.config.model import ModelConfig
from anabranch.models.fp8 import SCALE, Dequantized, as_grid, official_scale
from anabranch.models.inventory import TensorSpec, checkpoint_tensors
from anabranch.models.kimi import KimiForCausalLM
from anabranch.models.manifest import needed_shape
from anabranch.models.shards import open_shard, scan
from anabranch.models.weights import (
    RULES,
    Part,
    Sliceable,
    StoredPart,
    copy_shard,
    leaf_of,
    locate,
    rank_of,
    shard,
    span,
)
from anabranch.ops.fp8_linear.reference import CODES, quantize

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class _Given:
    """One official tensor of an update: the given tensor that it lies in, what that was called, and the part it is."""

    said: str
    tensor: torch.Tensor
    full: Sliceable


def update_weights(
    model: KimiForCausalLM, items: Iterable[tuple[str, torch.Tensor]] | Path, *, write: bool = True
) -> int:
    """Overwrite weights of `model` in place; returns how many of them this rank holds.

    Args:
        items: (name, unsharded tensor) in any spelling that a checkpoint may use, on any device. Read to its end, and
            checked, before anything is written; weights that are not named keep their values. A path is a checkpoint
            directory with all of them.
        write: False checks alone: of several ranks one may refuse what the others would take.

    Raises:
        ValueError: in one line: a name the model does not have, or has twice; a wrong shape or dtype; half of a pair
            of codes and scales; a value that is NaN or infinite in the dtype in which it will be held. The model is
            unchanged.
    """
    views: dict[str, torch.Tensor] = model.state_dict()
    given = _collect(model.config, _stored(items, model.config) if isinstance(items, Path) else items)
    for name in given:
        _check_pair(name, given)
    _check_finite(given, views)
    held = [name for name in given if name in views and not name.endswith(SCALE)]
    with torch.no_grad():
        for name in held if write else ():
            _write(model, views, name, given)
    return len(held)


def _stored(path: Path, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint directory `path` that the model uses, memory-mapped: a whole new set of weights.

    Raises:
        ValueError: in one line: the files cannot be read, or lack a weight of the model.
    """
    stored = scan(path)
    missing = dict.fromkeys(checkpoint_tensors(replace(config, fp8=())))
    for file in sorted({tensor.file for tensor in stored.values()}):
        with open_shard(file) as shard_file:
            for name in (name for name, tensor in stored.items() if tensor.file == file):
                parts = locate(name, config)
                if isinstance(parts, str):  # the vision tower, rotary tables
                    continue
                for part in parts:
                    missing.pop(part.name, None)
                yield name, shard_file.get_tensor(name)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{path}: lacks {next(iter(missing))}{more}; need all weights of the model")


def _collect(config: ModelConfig, items: Iterable[tuple[str, torch.Tensor]]) -> dict[str, _Given]:
    """Official name -> what was given; every name, shape and dtype is one that the model can take."""
    known, given = _inventory(config), {}
    for name, tensor in items:
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            shown = "one on meta" if isinstance(tensor, torch.Tensor) else repr(tensor)
            raise ValueError(f"{name}: need a tensor with values, not {shown}")
        parts = _parts(name, config, known)
        _check(name, tensor, parts, config, known)
        for part in parts:
            if part.name in given:
                raise ValueError(f"{name}: {part.name} is there twice, also as {given[part.name].said}")
            given[part.name] = _Given(name, tensor, StoredPart(tensor, tuple(tensor.shape), part))
    return given


@lru_cache(maxsize=4)
def _inventory(config: ModelConfig) -> Mapping[str, TensorSpec]:
    """Every weight in plain form, and the scales that a block-FP8 one would have."""
    plain = checkpoint_tensors(replace(config, fp8=()))
    matrices = (n.removesuffix(".weight") for n, s in plain.items() if n.endswith(".weight") and len(s.shape) == 2)
    coded = checkpoint_tensors(replace(config, fp8=tuple(matrices)))
    return plain | {name: spec for name, spec in coded.items() if name.endswith(SCALE)}


def _parts(name: str, config: ModelConfig, known: Mapping[str, TensorSpec]) -> list[Part]:
    parts = locate(name, config)
    if isinstance(parts, str):
        raise ValueError(f"{name}: this model does not use it")
    if parts[0].name not in known:
        parts = [part._replace(name=official_scale(part.name)) for part in parts]
    for part in parts:
        if part.name not in known:
            packed = part.name.removesuffix(".weight") + ".weight_packed" in known
            why = "the experts are MXFP4; give .weight_packed and .weight_scale" if packed else "no such weight"
            raise ValueError(f"{name}: {why}")
    return parts


def _check(
    name: str, tensor: torch.Tensor, parts: list[Part], config: ModelConfig, known: Mapping[str, TensorSpec]
) -> None:
    """Shape and dtype of one given tensor."""
    shape, spec = tuple(tensor.shape), known[parts[0].name]
    needed = needed_shape(shape, parts, known, config)
    if shape != needed:
        raise ValueError(f"{name}: shape {list(shape)}, need {list(needed)}")
    accepted = (torch.uint8,) if spec.dtype == torch.uint8 else _FLOATS
    if parts == [Part(parts[0].name)] and f"{parts[0].name}_scale_inv" in known:
        accepted = (*_FLOATS, CODES)
    if tensor.dtype not in accepted:
        raise ValueError(f"{name}: dtype {_spell(tensor.dtype)}, need one of {', '.join(map(_spell, accepted))}")


def _spell(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_pair(name: str, given: Mapping[str, _Given]) -> None:
    """Codes and scales mean nothing without each other."""
    base, _, kind = name.rpartition(".")
    dtype = given[name].tensor.dtype
    twin = {"weight_packed": "weight_scale", "weight_scale": "weight_packed", "weight_scale_inv": "weight"}.get(kind)
    if dtype == CODES:
        twin = "weight_scale_inv"
    if twin is not None and f"{base}.{twin}" not in given:
        raise ValueError(f"{given[name].said}: needs {base}.{twin} in the same update")
    if name.endswith(SCALE) and (plain := given[f"{base}.weight"]).tensor.dtype != CODES:
        raise ValueError(f"{given[name].said}: {plain.said} is {_spell(plain.tensor.dtype)}, which has no scales")


def _check_finite(given: Mapping[str, _Given], views: Mapping[str, torch.Tensor]) -> None:
    """One synchronisation a device. A number may also overflow on its way into a narrower dtype."""
    found: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, one in given.items():
        by_name, tensor = found.setdefault(one.tensor.device, {}), one.tensor
        if one.said not in by_name:
            held = views[name].dtype if name in views else tensor.dtype
            if tensor.dtype in _FLOATS and held in _FLOATS:
                tensor = torch.stack(tensor.aminmax()).to(held)
            by_name[one.said] = span(name, tensor)
    for by_name in found.values():
        for said, ok in zip(by_name, torch.stack(list(by_name.values())).isfinite().tolist(), strict=True):
            if not ok:
                raise ValueError(f"{said}: holds a value that is NaN, or infinite in the dtype of the weight")


def _write(model: KimiForCausalLM, views: Mapping[str, torch.Tensor], name: str, given: Mapping[str, _Given]) -> None:
    full, view, scale = given[name].full, views[name], name.removesuffix(".weight") + SCALE
    grid = as_grid(given[scale].tensor) if given[name].tensor.dtype == CODES else None
    if view.dtype != CODES:
        copy_shard(view, full if grid is None else Dequantized(full, grid), name, model.config, model.parallel)
        return
    if grid is None:
        rule = RULES[leaf_of(name)]
        # a rank's part is whole blocks, so that it gets the codes that quantising all of the weight would give it
        codes, scales = quantize(shard(full, rule, *rank_of(rule, model.parallel)).to(view.device))
        view.copy_(codes)
        views[scale].copy_(scales)
    else:
        copy_shard(view, full, name, model.config, model.parallel)
        copy_shard(views[scale], grid, scale, model.config, model.parallel)
