"""Block-FP8 in plain PyTorch. See spec.py for shapes."""

import torch
import torch.nn.functional as F

BLOCK = 128  # rows, and columns, under one scale
CODES = torch.float8_e4m3fn
_LARGEST = 448.0  # E4M3 has no infinity; two of its codes are NaN


def blocks(size: int) -> int:
    """Scale blocks that cover `size` rows or columns."""
    return -(-size // BLOCK)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, first_row: int = 0, first_column: int = 0) -> torch.Tensor:
    """fp32 values of a [N, K] part of a weight that starts at (first_row, first_column); `scale` is the whole grid."""
    rows = torch.arange(first_row, first_row + codes.shape[0], device=codes.device) // BLOCK
    columns = torch.arange(first_column, first_column + codes.shape[1], device=codes.device) // BLOCK
    return codes.float() * scale.to(codes.device).float()[rows][:, columns]


def quantize(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scale) of a [N, K] weight: each block's largest magnitude becomes 448, the rest the nearest code."""
    rows, columns = w.shape
    grid = (blocks(rows), blocks(columns))
    padded = F.pad(w.float(), (0, grid[1] * BLOCK - columns, 0, grid[0] * BLOCK - rows))
    tiles = padded.view(grid[0], BLOCK, grid[1], BLOCK)
    largest = tiles.abs().amax((1, 3))
    scale = torch.where(largest > 0, largest / _LARGEST, 1.0)
    scaled = (tiles / scale[:, None, :, None]).clamp(-_LARGEST, _LARGEST)
    return scaled.view_as(padded)[:rows, :columns].to(CODES).contiguous(), scale


def fp8_linear(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """y = x W^T with W dequantised, multiplied and summed in fp32."""
    return F.linear(x.float(), dequantize(codes, scale)).to(x.dtype)
