"""Products with a block-FP8 weight against the same weight in bf16, weights cold.

`bf16` is the product that a model of plain weights would run for these shapes. The gate holds every FP8 arm to the
weight dequantised in fp32; the bf16 arm multiplies that weight rounded to bf16.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

import torch

from anabranch.measure.arms import ArmTimes, Least, held_to, sets_for, time_arms
from anabranch.measure.timing import READ_BYTES_PER_S
from anabranch.ops.fp8_linear.reference import CODES, blocks, dequantize
from anabranch.ops.fp8_linear.reference import fp8_linear as reference
from anabranch.ops.fp8_linear.spec import FP8_LINEAR, floor
from anabranch.ops.linear.spec import floor as plain_floor
from anabranch.ops.registry import IMPLEMENTATIONS

# (rows, columns) of the coded projections of one rank that read the same input
SHAPES = {
    "k3 kda tp8": (6144, 7168),  # q, k, v, g
    "kl kda tp1": (12288, 2304),  # q, k, v: its gate is low-rank and stays plain
    "k3 mla tp8": (3648, 7168),  # g, q_a, kv_a
}
CALLS = 24


class Weight(NamedTuple):
    """One weight in both forms: [N, K] codes under scales, and bf16."""

    codes: torch.Tensor
    scale: torch.Tensor
    plain: torch.Tensor


def bench_fp8_linear(device: torch.device, shapes: Sequence[str], rows: Sequence[int]) -> Iterator[ArmTimes]:
    """Every named shape at every M.

    Raises:
        GateRedError: an FP8 product is outside its class.
        ValueError: a shape without that name.
    """
    for name in shapes:
        if name not in SHAPES:
            raise ValueError(f"shapes={name!r}: accepted are {', '.join(SHAPES)}")
    for name in shapes:
        yield from bench_shape(device, name, *SHAPES[name], rows)


def bench_shape(device: torch.device, name: str, n: int, k: int, rows: Sequence[int]) -> Iterator[ArmTimes]:
    """One shape, [n, k], at every M."""
    weights = [weight(device, n, k) for _ in range(sets_for(n * k))]
    coded, plain = _fp8(device), _plain(device)
    for m in rows:
        x = torch.randn(m, k, device=device).bfloat16()
        _check(x, weights[0], coded, f"fp8_linear {name} at M={m}")
        arms: dict[str, Callable[[Weight], torch.Tensor]] = {"bf16": lambda w, x=x: plain(x, w.plain)}
        arms |= {f"fp8 {arm}": lambda w, x=x, run=run: run(x, w.codes, w.scale) for arm, run in coded.items()}
        least = dict.fromkeys(arms, Least.of(floor(m, n, k), READ_BYTES_PER_S))
        least["bf16"] = Least.of(plain_floor(m, n, k), READ_BYTES_PER_S)
        case = {"name": name, "m": m, "n": n, "k": k, "dtype": "bfloat16"}
        kind = FP8_LINEAR.equality.kind
        yield time_arms("fp8_linear", case, arms, weights, device, least=least, equality=kind, calls=CALLS)


def weight(device: torch.device, n: int, k: int) -> Weight:
    """Codes of every magnitude, scales that make the weight's values about K^-0.5."""
    codes = (torch.randn(n, k, device=device) * 64).clamp(-448, 448).to(CODES)
    scale = (0.5 + torch.rand(blocks(n), blocks(k), device=device)) * k**-0.5 / 64
    return Weight(codes, scale, dequantize(codes, scale).bfloat16())


def _fp8(device: torch.device) -> Mapping[str, Callable[..., torch.Tensor]]:
    """The kernels that may run here; the PyTorch forms dequantise the whole weight and are no arms."""
    found = [i for i in IMPLEMENTATIONS["fp8_linear"] if i.device and i.verdict(None, device, False).ok]
    return {i.name: import_module(f"anabranch.ops.fp8_linear.{i.name}").fp8_linear for i in found}


def _plain(device: torch.device) -> Callable[..., torch.Tensor]:
    first = next(i for i in IMPLEMENTATIONS["linear"] if i.verdict(None, device, False).ok)
    return import_module(f"anabranch.ops.linear.{first.name}").linear


def _check(x: torch.Tensor, w: Weight, coded: Mapping[str, Callable[..., torch.Tensor]], what: str) -> None:
    want = reference(x, w.codes, w.scale)
    with held_to(what):
        for arm, run in coded.items():
            FP8_LINEAR.equality.check(run(x, w.codes, w.scale), want, arm)
