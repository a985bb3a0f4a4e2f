"""Where each sequence's new tokens lie in a packed batch: on the host for loops, on the device for kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anabranch.ops.staging import to_device


@dataclass(frozen=True, slots=True)
class Segments:
    """B segments of a packed batch of T tokens.

    `lengths` [B]: new tokens of each sequence, sum T. `totals` [B]: its tokens in the cache once they are in.
    `offsets` int64 [B+1] and `ends` int64 [B] are, on the device, the running sum of the lengths and the totals.
    """

    lengths: tuple[int, ...]
    totals: tuple[int, ...]
    offsets: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(
        cls, lengths: Sequence[int], totals: Sequence[int] | None = None, device: torch.device | str | None = None
    ) -> "Segments":
        """From host numbers; without `totals` every sequence is new."""
        totals = tuple(lengths if totals is None else totals)
        offsets = [0]
        for length in lengths:
            offsets.append(offsets[-1] + length)
        return cls(
            tuple(lengths),
            totals,
            to_device(offsets, device),
            to_device(totals, device),
        )

    def __len__(self) -> int:
        return len(self.lengths)
