"""A stand-in for rows on a GPU, where only the choice of a kernel is tested."""

import torch


class OnDevice:
    """As much of a dense bf16 tensor [rows, width] as that choice looks at."""

    is_cuda, dtype = True, torch.bfloat16

    def __init__(self, rows: int, width: int) -> None:
        self.shape = (rows, width)

    def __len__(self) -> int:
        return self.shape[0]

    def stride(self, dim: int) -> int:
        return (self.shape[1], 1)[dim]

    def data_ptr(self) -> int:
        return 0

    def get_device(self) -> int:
        return 0
