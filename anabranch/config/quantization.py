"""Which weights a config.json says are quantised: the exporters' dialects, their targets and their ignore lists.

A checkpoint's files have the last word when it is loaded; this is for plans and dummy weights, which have no files.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

_MXFP4 = "mxfp4-pack-quantized"
_BLOCK = [128, 128]
_ACCEPTED = f"accepted: {_MXFP4}, or block-FP8 with blocks of 128 x 128"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """One format, the modules it is meant for, and those it leaves out; patterns as exporters write them."""

    format: Literal["mxfp4", "fp8"]
    targets: Sequence[str]
    ignore: Sequence[str]

    def covers(self, module: str) -> bool:
        """Whether the module of this official name is stored in this format."""
        return any(_matches(t, module) for t in self.targets) and not any(_matches(i, module) for i in self.ignore)


def schemes(quantization: Mapping[str, Any], where: str) -> list[Scheme]:
    """The formats of a `quantization_config`.

    Raises:
        ValueError: a dialect or format that is not known, with what is.
    """
    method = quantization.get("quant_method")
    if method == "fp8":
        if quantization.get("weight_block_size") != _BLOCK:
            raise _wrong(where, "weight_block_size", quantization.get("weight_block_size"))
        ignore = _names(quantization, where, "modules_to_not_convert", "ignored_layers")
        return [Scheme(format="fp8", targets=["Linear"], ignore=ignore)]
    if method == "modelopt" or "quant_algo" in quantization:
        return list(_modelopt(quantization, where))
    return list(_compressed_tensors(quantization, where))


def _modelopt(quantization: Mapping[str, Any], where: str) -> Iterator[Scheme]:
    algorithm = quantization.get("quant_algo")
    ignore = _names(quantization, where, "exclude_modules", "ignore")
    layers = quantization.get("quantized_layers") if algorithm == "MIXED_PRECISION" else {"Linear": quantization}
    if not isinstance(layers, dict) or not all(isinstance(layer, dict) for layer in layers.values()):
        raise _wrong(where, "quantized_layers", layers)
    for layer in layers.values():
        if layer.get("quant_algo") != "FP8_PB_WO":
            raise _wrong(where, "quant_algo", layer.get("quant_algo"))
    yield Scheme(format="fp8", targets=list(layers), ignore=ignore)


def _compressed_tensors(quantization: Mapping[str, Any], where: str) -> Iterator[Scheme]:
    common, groups = quantization.get("format"), quantization.get("config_groups") or {"": {}}
    ignore = _names(quantization, where, "ignore")
    for name, group in groups.items():
        weights, stored = group.get("weights") or {}, group.get("format") or common
        targets = group.get("targets") or ["Linear"]
        if stored == _MXFP4:
            yield Scheme(format="mxfp4", targets=targets, ignore=ignore)
        elif (weights.get("num_bits"), weights.get("type"), weights.get("block_structure")) == (8, "float", _BLOCK):
            yield Scheme(format="fp8", targets=targets, ignore=ignore)
        else:
            raise _wrong(f"{where}: {name}" if name else where, "format", stored)


def _names(quantization: Mapping[str, Any], where: str, *fields: str) -> list[str]:
    value = next((quantization[f] for f in fields if quantization.get(f) is not None), [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{where}: field {fields[0]!r} is {value!r}; need a list of names")
    return value


def _matches(pattern: str, module: str) -> bool:
    """A regular expression, a glob, the class that all of them are, or a run of whole name components."""
    if pattern == "Linear":
        return True
    for spelling in (module, f"language_model.{module}"):
        if pattern.startswith("re:"):
            found = re.match(pattern[3:], spelling) is not None
        elif "*" in pattern:
            found = fnmatchcase(spelling, pattern)
        else:
            found = f".{pattern}." in f".{spelling}."
        if found:
            return True
    return False


def _wrong(where: str, field: str, value: Any) -> ValueError:
    return ValueError(f"{where}: field {field!r} is {value!r}; {_ACCEPTED}")
