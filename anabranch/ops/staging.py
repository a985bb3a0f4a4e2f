"""Copies between host and device that the host does not wait for."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import ArrayLike

_UNIT = 16  # numbers to which every part of a buffer is aligned


def to_device(
    values: Sequence[int] | Sequence[Sequence[int]] | Sequence[float],
    device: torch.device | str | None,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """A device tensor of host numbers; the copy is queued on the current stream."""
    host = torch.tensor(values, dtype=dtype)
    if device is None or torch.device(device).type != "cuda":
        return host.to(device)
    # from pageable memory the copy would wait for everything that was launched before it
    return host.pin_memory().to(device, non_blocking=True)


def together(device: torch.device | str, **values: ArrayLike) -> dict[str, torch.Tensor]:
    """int64 device tensors of host numbers by name, queued as one copy: parts of one buffer, each at 128 bytes."""
    arrays = [np.asarray(value, dtype=np.int64) for value in values.values()]
    places, room = spans([a.size for a in arrays])
    host = torch.zeros(room, dtype=torch.int64, pin_memory=torch.device(device).type == "cuda")
    filled = host.numpy()
    for place, a in zip(places, arrays, strict=True):
        filled[place] = a.ravel()
    placed = host.to(device, non_blocking=True)
    return {name: placed[place].view(a.shape) for name, place, a in zip(values, places, arrays, strict=True)}


def spans(counts: Sequence[int]) -> tuple[list[slice], int]:
    """Where parts of so many int64 numbers stand in one buffer, each at 128 bytes, and how many numbers it has."""
    starts = [0, *accumulate(-(-count // _UNIT) * _UNIT for count in counts)]
    return [slice(start, start + count) for start, count in zip(starts, counts, strict=False)], starts[-1]


def to_host(values: torch.Tensor) -> torch.Tensor:
    """A host copy that holds the values once the device has reached this point (record an event to know)."""
    if not values.is_cuda:
        return values.clone()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
