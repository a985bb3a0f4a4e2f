"""Block-FP8 tensors of a checkpoint: which weights have them, under which name their scales lie, how they are read."""

from collections.abc import Mapping

import torch

from anabranch.config.model import ModelConfig
from anabranch.models.shards import StoredTensor
from anabranch.models.weights import Sliceable, locate
from anabranch.ops.fp8_linear.reference import dequantize

CODES = "F8_E4M3"
SCALE = ".weight_scale_inv"  # the official spelling; exporters also write `.weight_scale`, as [rows, 1, columns, 1]
SPELLINGS = (SCALE, ".weight_scale")


def weight_of_scale(name: str) -> str | None:
    """The weight that the tensor `name` would scale."""
    return next((name.removesuffix(s) + ".weight" for s in SPELLINGS if name.endswith(s)), None)


def official_scale(name: str) -> str:
    """`name` with the official spelling of a block-FP8 scale."""
    weight = weight_of_scale(name)
    return name if weight is None else weight.removesuffix(".weight") + SCALE


def stored_fp8(stored: Mapping[str, StoredTensor], config: ModelConfig) -> tuple[str, ...]:
    """Official names of the modules whose weight a checkpoint holds as FP8 codes, whatever its config says."""
    found = []
    for name, tensor in stored.items():
        if tensor.dtype.startswith("F8_") and name.endswith(".weight") and len(tensor.shape) == 2:
            parts = locate(name, config)
            found += [] if isinstance(parts, str) else [part.name.removesuffix(".weight") for part in parts]
    return tuple(sorted(found))


def as_grid(scale: torch.Tensor) -> torch.Tensor:
    """A stored scale as fp32 [row blocks, column blocks]."""
    return (scale[:, 0, :, 0] if scale.dim() == 4 else scale).float()


class Dequantized:
    """A block-FP8 weight as a plain fp32 tensor; slicing it reads and dequantises only what the slice covers."""

    def __init__(self, codes: Sliceable, grid: torch.Tensor) -> None:
        self.shape = tuple(codes.shape)
        self._codes, self._grid = codes, grid

    def __getitem__(self, index: tuple[slice, ...], /) -> torch.Tensor:
        row, column = (s.indices(size)[0] for s, size in zip(index, self.shape, strict=True))
        return dequantize(self._codes[index], self._grid, row, column)
