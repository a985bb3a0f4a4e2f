"""What every operation declares about itself: its contract, its floor and how exactly it must be equal."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Equality:
    """How close an implementation must come to `reference.py`.

    `bitwise`: the same bytes. `rounding`: at most `ulp` units in the last place of the output dtype.
    `tolerance`: at most `bound[dtype]` relative to the largest reference value.
    """

    kind: Literal["bitwise", "rounding", "tolerance"]
    ulp: int = 0
    bound: Mapping[torch.dtype, float] | None = None

    def check(self, got: torch.Tensor, want: torch.Tensor, what: str = "result") -> None:
        """Raise AssertionError with the first differing coordinate and both values; NaN positions must match."""
        assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
        assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, want {want.dtype}"
        wrong = _different(got, want, self)
        if not wrong.any():
            return
        at = tuple(int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} values break {self.kind}, first at {at}: "
            f"got {got[at].item()!r}, want {want[at].item()!r}"
        )


def _different(got: torch.Tensor, want: torch.Tensor, rule: Equality) -> torch.Tensor:
    if rule.kind == "bitwise":
        as_bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
        return got.contiguous().view(as_bits) != want.contiguous().view(as_bits)
    nan = got.isnan() != want.isnan()
    g, w = got.double().nan_to_num(), want.double().nan_to_num()
    if rule.kind == "rounding":
        # the spacing of the output dtype at the larger of the two magnitudes
        eps = torch.finfo(got.dtype).eps
        step = torch.exp2(torch.floor(torch.log2(torch.maximum(g.abs(), w.abs()).clamp_min(1e-38)))) * eps
        return nan | ((g - w).abs() > rule.ulp * step)
    assert rule.bound is not None
    scale = w.abs().max().clamp_min(1e-30) if w.numel() else w.new_ones(())
    return nan | ((g - w).abs() > rule.bound[got.dtype] * scale)


BITWISE = Equality(kind="bitwise")


def tolerance(fp32: float, bf16: float) -> Equality:
    """A `tolerance` class with one bound for each dtype that the engine computes in (fp16 takes the bf16 bound)."""
    return Equality(kind="tolerance", bound={torch.float32: fp32, torch.bfloat16: bf16, torch.float16: bf16})


@dataclass(frozen=True, kw_only=True, slots=True)
class OpSpec:
    """One operation: tensor legends (`name -> "dtype [shape]"`), constraints, equality class and source."""

    name: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    constraints: tuple[str, ...] = ()
    equality: Equality
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """Least work of one call: bytes that must cross device memory once, and floating-point operations."""

    bytes: int
    flops: int
