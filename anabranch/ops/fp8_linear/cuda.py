"""The product of few tokens with a block-FP8 weight on Hopper. See spec.py for shapes, csrc/coded.cuh for the kernel.

Bits of an element depend on its row of x, its row of W and K alone. The order of addition is that of triton.py.
"""

from functools import cache
from typing import Any

import torch

from anabranch.ops import native
from anabranch.ops.fp8_linear import layout
from anabranch.ops.fp8_linear.reference import CODES
from anabranch.ops.skinny_gemm.configs import Clusters

FULL = (3648, 7168)  # a product that fills the device


@cache
def _clusters(device: int) -> Clusters:
    """What this device holds at once, asked of the driver: MIG slices and other parts have fewer multiprocessors."""

    def fit(XR: int, T: int) -> int:
        wanted = next(x for x in layout.candidates(T, *FULL) if (x.XR, x.T) == (XR, T))
        return native.load("fp8_linear").clusters(*FULL, _shape(wanted), device)

    return Clusters(fit(1, 8), fit(2, 128), 0)  # no variant makes clusters of eight


@cache
def _shape(wanted: layout.Layout) -> Any:
    from tvm_ffi import Shape

    return Shape(layout.as_ints(wanted))


@cache
def _always(rows: int, columns: int, device: int) -> bool:
    """Whether this device has a layout for a weight at every number of tokens."""
    found = [layout.choose(tile, rows, columns, _clusters(device)) for tile in layout.TILES]
    return None not in found


def layouts(tokens: int, rows: int, columns: int) -> list[layout.Layout]:
    """Every layout that this device has for [tokens, columns] x [rows, columns]^T."""
    return list(layout.candidates(tokens, rows, columns, _clusters(torch.cuda.current_device())))


def fits(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether these tensors can be multiplied here, up to 128 rows of x at a time; says nothing about speed."""
    return (
        (x.dtype, codes.dtype, scale.dtype) == (torch.bfloat16, CODES, torch.float32)
        and (x.stride(1) == codes.stride(1) == scale.stride(1) == 1)
        and (x.stride(0) % 8 == codes.stride(0) % 16 == 0 and x.data_ptr() % 16 == codes.data_ptr() % 16 == 0)
        and _always(codes.shape[0], x.shape[1], x.get_device())
    )


def multiply(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, wanted: layout.Layout | None = None
) -> torch.Tensor:
    """y = x W^T: [M <= 128, K] and codes [N, K] under scale -> [M, N]. `wanted` forces a layout; it changes no bit.

    Raises:
        ValueError: the shape is not one that the kernel supports; the message names the value.
    """
    y = torch.empty((x.shape[0], codes.shape[0]), dtype=x.dtype, device=x.device)
    _launch(x, codes, scale, y, wanted)
    return y


def fp8_linear(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """y = x W^T for any number of tokens, 128 at a time: each further launch reads the codes again."""
    y = torch.empty((x.shape[0], codes.shape[0]), dtype=x.dtype, device=x.device)
    for first in range(0, x.shape[0], layout.TOKENS):
        _launch(x[first : first + layout.TOKENS], codes, scale, y[first : first + layout.TOKENS], None)
    return y


def _launch(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, y: torch.Tensor, wanted: layout.Layout | None
) -> None:
    wanted = wanted or layout.choose(x.shape[0], codes.shape[0], x.shape[1], _clusters(x.get_device()))
    if wanted is None:
        raise ValueError(f"fp8_linear: no layout for {tuple(x.shape)} x {tuple(codes.shape)}; see layout.py")
    native.load("fp8_linear").multiply(x, codes.view(torch.uint8), scale, y, _shape(wanted))
