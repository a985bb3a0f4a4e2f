"""How the Triton kernel is laid out. Nothing here changes a bit of its result."""

import re
from dataclasses import dataclass

import torch

PARTS = 4  # fixed parts of K


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """T tokens against R rows, K columns a load; `split`: programs of their own for each part of K."""

    T: int
    R: int
    K: int
    warps: int
    stages: int
    split: bool = False

    def __post_init__(self) -> None:
        """ValueError: what the kernel cannot be compiled with."""
        if self.R not in (64, 128) or self.K not in (32, 64, 128) or self.T < 16 or self.T & (self.T - 1):
            raise ValueError(f"tile {self.name}: accepted are T a power of two from 16, R 64 or 128, K 32, 64 or 128")
        if self.warps not in (4, 8) or not 1 <= self.stages <= 8:
            raise ValueError(f"tile {self.name}: accepted are W 4 or 8, S 1 to 8")

    @property
    def name(self) -> str:
        """As `parse` reads it."""
        return f"T{self.T}R{self.R}K{self.K}W{self.warps}S{self.stages}{'P' if self.split else ''}"


def parse(name: str) -> Tile:
    """From T16R64K128W4S5P: tokens, rows, columns, warps, stages, P where K is split.

    Raises:
        ValueError: another form, or what the kernel cannot be compiled with.
    """
    found = re.fullmatch(r"T(\d+)R(\d+)K(\d+)W(\d+)S(\d+)(P?)", name)
    if found is None:
        raise ValueError(f"tile {name!r}: accepted is a form like T16R64K128W4S5P, P for programs of each part of K")
    T, R, K, warps, stages = (int(n) for n in found.groups()[:5])
    return Tile(T=T, R=R, K=K, warps=warps, stages=stages, split=bool(found[6]))


def choose(tokens: int, rows: int, dtype: torch.dtype) -> Tile:
    """The tile for this product: up to 128 tokens about three blocks a multiprocessor of an H200, all resident."""
    if dtype == torch.float32:
        return Tile(T=16, R=64, K=32, warps=4, stages=2, split=tokens <= 64)
    if tokens > 128:
        return Tile(T=128, R=128, K=64, warps=8, stages=4)
    if tokens > 32 or rows > 3 * 132 // PARTS * 64:
        T = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
        return Tile(T=T, R=128, K=128, warps=8, stages=4, split=True)
    return Tile(T=16 if tokens <= 16 else 32, R=64, K=128, warps=4, stages=5 if tokens <= 16 else 4, split=True)
