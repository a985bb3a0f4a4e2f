"""Stacked expert weights without a model around them, plain or MXFP4, with the views that the reference asks for."""

from dataclasses import dataclass

import torch

from anabranch.ops.mxfp4.reference import dequantize


@dataclass(kw_only=True)
class PlainBank:
    """w13 [E, 2*I, W] and w2 [E, W, I]. `total`: experts of all ranks, these alone if not given."""

    first: int
    count: int
    w13: torch.Tensor
    w2: torch.Tensor
    total: int = 0

    def __post_init__(self) -> None:
        self.total = self.total or self.count

    def gate_up(self, expert: int) -> torch.Tensor:
        return self.w13[expert]

    def down(self, expert: int) -> torch.Tensor:
        return self.w2[expert]


@dataclass(kw_only=True)
class Mxfp4Bank:
    """Codes [E, rows, columns / 2] and scales [E, rows, columns / 32] of the same two stacks."""

    first: int
    count: int
    w13_packed: torch.Tensor
    w13_scale: torch.Tensor
    w2_packed: torch.Tensor
    w2_scale: torch.Tensor
    dtype: torch.dtype
    total: int = 0

    def __post_init__(self) -> None:
        self.total = self.total or self.count

    def gate_up(self, expert: int) -> torch.Tensor:
        return dequantize(self.w13_packed[expert], self.w13_scale[expert], self.dtype)

    def down(self, expert: int) -> torch.Tensor:
        return dequantize(self.w2_packed[expert], self.w2_scale[expert], self.dtype)


def plain_bank(
    count: int, inner: int, width: int, dtype: torch.dtype, *, first: int = 0, device: str = "cpu", spread: float = 0.02
) -> PlainBank:
    """Normal weights (uninitialised on meta)."""
    make = torch.empty if device == "meta" else torch.randn
    w13 = make(count, 2 * inner, width, dtype=dtype, device=device)
    w2 = make(count, width, inner, dtype=dtype, device=device)
    return PlainBank(first=first, count=count, w13=w13 * spread, w2=w2 * spread)


def mxfp4_bank(
    count: int,
    inner: int,
    width: int,
    dtype: torch.dtype,
    *,
    first: int = 0,
    total: int = 0,
    device: str = "cpu",
) -> Mxfp4Bank:
    """Every code, under scales from 2^-9 to 2^-2 (uninitialised on meta)."""

    def draw(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        if device == "meta":
            return torch.empty(shape, dtype=torch.uint8, device=device)
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device)

    return Mxfp4Bank(
        first=first,
        count=count,
        total=total,
        w13_packed=draw(count, 2 * inner, width // 2),
        w13_scale=draw(count, 2 * inner, width // 32, low=118, high=126),
        w2_packed=draw(count, width, inner // 2),
        w2_scale=draw(count, width, inner // 32, low=118, high=126),
        dtype=dtype,
    )


def random_routing(tokens: int, experts: int, top_k: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """(weights fp32, experts int64) [T, k]: distinct experts, uniform."""
    chosen = torch.rand(tokens, experts, device=device).topk(top_k, -1).indices
    return torch.rand(tokens, top_k, device=device), chosen
