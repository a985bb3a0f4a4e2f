"""Copies between host and device that the host does not wait for."""

from collections.abc import Sequence

import torch


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


def to_host(values: torch.Tensor) -> torch.Tensor:
    """A host copy that holds the values once the device has reached this point (record an event to know)."""
    if not values.is_cuda:
        return values.clone()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
