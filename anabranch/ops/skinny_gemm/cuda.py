"""The few-token products on Hopper. See spec.py for shapes and csrc/skinny.cuh for how they work."""

from functools import cache
from typing import Any

import torch

from anabranch.ops import native
from anabranch.ops.skinny_gemm import configs
from anabranch.ops.skinny_gemm.spec import RANK

ROWS = 3648  # of a product that fills the device


@cache
def _clusters(device: int) -> configs.Clusters:
    """What this device holds at once, asked of the driver: MIG slices and other parts have fewer multiprocessors."""

    def fit(C: int, XR: int, T: int) -> int:
        config = next(c for c in configs.candidates(T, ROWS, 7168) if (c.C, c.XR, c.T) == (C, XR, T))
        return native.load("skinny_gemm").clusters(ROWS, _shape(config), device)

    return configs.Clusters(fit(2, 1, 8), fit(4, 1, 16), fit(2, 4, 128))


@cache
def _shape(config: configs.Config) -> Any:
    from tvm_ffi import Shape

    return Shape(configs.as_ints(config))


def fits(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether these tensors can be multiplied here; says nothing about speed."""
    return (
        x.dtype == w.dtype == torch.bfloat16
        and configs.supported(x.shape[0], w.shape[0], x.shape[1])
        and (x.stride(1) == w.stride(1) == 1 and x.stride(0) % 8 == 0 and w.stride(0) % 8 == 0)
        and (x.data_ptr() % 16 == 0 and w.data_ptr() % 16 == 0)
    )


def linear(x: torch.Tensor, w: torch.Tensor, config: configs.Config | None = None) -> torch.Tensor:
    """y = x w^T: [M, K] and [N, K] -> [M, N]. `config` forces a layout; it does not change a bit.

    Raises:
        ValueError: the shape is not one that the kernel supports; the message names the value.
    """
    config = config or configs.choose(x.shape[0], w.shape[0], x.shape[1], _clusters(x.get_device()))
    if config is None:
        raise ValueError(f"skinny_gemm: no layout for {tuple(x.shape)} x {tuple(w.shape)}; see spec.py")
    y = torch.empty((x.shape[0], w.shape[0]), dtype=x.dtype, device=x.device)
    native.load("skinny_gemm").gemm(x, w, y, _shape(config))
    return y


def low_rank(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """y[g] = x[g] w[g]^T: [G, M, 128] and [G, N, 128] -> [G, M, N]."""
    y = torch.empty((x.shape[0], x.shape[1], w.shape[1]), dtype=x.dtype, device=x.device)
    native.load("skinny_gemm").low_rank(x, w, y)
    return y


def low_rank_fits(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether `low_rank` can multiply these [G, M, 128] and [G, N, 128]."""
    return (
        x.dtype == w.dtype == torch.bfloat16
        and (x.shape[-1] == w.shape[-1] == RANK and w.shape[1] % 2 == 0)
        and (x.stride(-1) == w.stride(-1) == 1 and w.stride(1) == RANK)
        and (x.stride(0) % 8 == x.stride(1) % 8 == 0 and x.data_ptr() % 16 == 0)
    )


def gemm_low_rank(
    x: torch.Tensor,
    w: torch.Tensor,
    low_row0: int,
    w2: torch.Tensor,
    sync: torch.Tensor,
    config: configs.Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, y2): y = x w^T [M, N] and, in the same launch, y2[i] = y[:, low_row0 + 128 i ..] w2[i]^T.

    `w2`: [sides, N2, 128] -> y2 [sides, M, N2]. `sync`: two int32 words that are zero and belong to this layer alone;
    they are zero again afterwards.
    """
    sides, rows, _ = w2.shape
    config = config or low_rank_layout(x.shape[0], w, low_row0, x.get_device())
    if config is None:
        raise ValueError(f"gemm_low_rank: no layout for {tuple(x.shape)} x {tuple(w.shape)}; see spec.py")
    y = torch.empty((x.shape[0], w.shape[0]), dtype=x.dtype, device=x.device)
    y2 = torch.empty((sides, x.shape[0], rows), dtype=x.dtype, device=x.device)
    native.load("skinny_gemm").gemm_low_rank(x, w, y, _shape(config), low_row0, w2, y2, sync)
    return y, y2


def low_rank_layout(tokens: int, w: torch.Tensor, low_row0: int, device: int) -> configs.Config | None:
    """The layout that `gemm_low_rank` would take on this device, None where no variant fits."""
    return configs.choose_low_rank(tokens, w.shape[0], w.shape[1], low_row0, _clusters(device))
