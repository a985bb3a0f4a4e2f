"""Where tensors lie on disk: the safetensors files of a checkpoint directory, with or without an index."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class StoredTensor(NamedTuple):
    """A tensor on disk; `dtype` as safetensors spells it ("BF16", "F8_E4M3", ...)."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@contextmanager
def open_shard(file: Path) -> Iterator[Any]:
    """An open safetensors file, memory-mapped. Whatever is wrong with it becomes a ValueError that names it."""
    try:
        shard = safe_open(file, "pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: cannot be read as a safetensors file ({error})") from error
    with shard:
        try:
            yield shard
        except SafetensorError as error:
            raise ValueError(f"{file}: damaged safetensors file ({error})") from error


def scan(path: str | Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint directory `path`, read from the headers of its files.

    Files are `model.safetensors`, else those that `model.safetensors.index.json` names, else every `*.safetensors`.

    Raises:
        ValueError: no such directory or no weight file; a file that is damaged, or that the index names and is not
            there; a tensor in two files, or not in the file where the index puts it.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ValueError(f"{directory}: no such directory; need a local checkpoint directory")
    index = _read_index(directory)
    files = _weight_files(directory, index)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in read_header(file):
            if name in tensors:
                raise ValueError(f"{file}: tensor {name} is in {tensors[name].file.name} as well")
            tensors[name] = tensor
    for name, file_name in index.items():
        if name not in tensors or tensors[name].file != directory / file_name:
            raise ValueError(f"{directory / INDEX_FILE}: puts tensor {name} in {file_name}, which lacks it")
    return tensors


def has_packed_experts(names: Iterable[str]) -> bool:
    """Whether tensors of these names make a checkpoint with MXFP4 experts, whatever its config says."""
    return any(name.endswith(".weight_packed") for name in names)


def _read_index(directory: Path) -> dict[str, str]:
    """Tensor -> file name; empty when there is no index, or a single file that makes it moot."""
    file = directory / INDEX_FILE
    if (directory / SINGLE_FILE).is_file() or not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{file}: need an object 'weight_map' from tensor names to file names")
    return weight_map


def _weight_files(directory: Path, index: dict[str, str]) -> list[Path]:
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    if index:
        named = sorted(set(index.values()))
        for file_name in named:
            if not (directory / file_name).is_file():
                tensor = next(name for name, holder in index.items() if holder == file_name)
                raise ValueError(f"{directory / INDEX_FILE}: puts tensor {tensor} in {file_name}, which does not exist")
        return [directory / file_name for file_name in named]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory}: no safetensors file; need {SINGLE_FILE} or shards of it")
    return files


def read_header(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    with open_shard(file) as shard:
        names: list[str] = shard.keys()
        for name in names:
            tensor = shard.get_slice(name)
            yield name, StoredTensor(file, tuple(tensor.get_shape()), tensor.get_dtype())
