"""Products with a block-FP8 weight against the same weight in bf16, weights cold.

`bf16` is the product that a model of plain weights would run for these shapes. The gate holds every FP8 arm to the
weight dequantised in fp32; the bf16 arm multiplies that weight rounded to bf16. FP8 arms are the implementations that
may run here, each launch once, the library over the expanded weight at every M (`library`), and the tiles of the Triton
kernel or the layouts of the CUDA kernel that are asked for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import NamedTuple

import torch

from anabranch.measure.arms import ArmTimes, Least, held_to, sets_for, time_arms
from anabranch.measure.timing import READ_BYTES_PER_S
from anabranch.ops.fp8_linear import layout
from anabranch.ops.fp8_linear.reference import CODES, blocks, dequantize
from anabranch.ops.fp8_linear.reference import fp8_linear as reference
from anabranch.ops.fp8_linear.spec import FP8_LINEAR, floor
from anabranch.ops.fp8_linear.tile import Tile, parse
from anabranch.ops.linear.spec import floor as plain_floor
from anabranch.ops.registry import IMPLEMENTATIONS

# (rows, columns) of the coded projections of one rank that read the same input
SHAPES = {
    "k3 kda tp8": (6144, 7168),  # q, k, v, g
    "kl kda tp1": (12288, 2304),  # q, k, v: its gate is low-rank and stays plain
    "k3 mla tp8": (3648, 7168),  # g, q_a, kv_a
}
CALLS = 24
LAYOUTS = "layouts"  # among the tiles: every layout of the CUDA kernel
MANY = layout.TOKENS + 1  # tokens from which implementations for few go another way


class Weight(NamedTuple):
    """One weight in both forms: [N, K] codes under scales, and bf16."""

    codes: torch.Tensor
    scale: torch.Tensor
    plain: torch.Tensor


def bench_fp8_linear(
    device: torch.device, shapes: Sequence[str], rows: Sequence[int], tiles: Sequence[str] = ()
) -> Iterator[ArmTimes]:
    """Every named shape at every M; `tiles` as ops/fp8_linear/tile.py names them, each timed where its T is near M.

    Among them `layouts` stands for every layout of the CUDA kernel that holds M tokens.

    Raises:
        GateRedError: an FP8 product is outside its class.
        ValueError: a shape without that name, or a tile that is none.
    """
    chosen = [parse(tile) for tile in tiles if tile != LAYOUTS]
    for name in shapes:
        if name not in SHAPES:
            raise ValueError(f"shapes={name!r}: accepted are {', '.join(SHAPES)}")
    for name in shapes:
        yield from bench_shape(device, name, *SHAPES[name], rows, chosen, LAYOUTS in tiles)


def bench_shape(
    device: torch.device,
    name: str,
    n: int,
    k: int,
    rows: Sequence[int],
    tiles: Sequence[Tile] = (),
    layouts: bool = False,
) -> Iterator[ArmTimes]:
    """One shape, [n, k], at every M."""
    weights = [weight(device, n, k) for _ in range(sets_for(n * k))]
    plain = _plain(device)
    for m in rows:
        x = torch.randn(m, k, device=device).bfloat16()
        coded = {**_distinct(_fp8(device), m), **_tiled(tiles, m), **(_laid_out(m, n, k) if layouts else {})}
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
    arms = {i.name: import_module(f"anabranch.ops.fp8_linear.{i.name}").fp8_linear for i in found}
    if "expanded" in arms:
        arms["library"] = import_module("anabranch.ops.fp8_linear.expanded").by_library
    return arms


def _distinct(arms: Mapping[str, Callable[..., torch.Tensor]], m: int) -> Mapping[str, Callable[..., torch.Tensor]]:
    """Without what launches, at M tokens, the kernels of another arm."""
    if "skinny" not in arms:
        return arms
    same = {"expanded", "segmented" if m < MANY else "library"}
    return {name: run for name, run in arms.items() if name not in same}


def _laid_out(m: int, n: int, k: int) -> Mapping[str, Callable[..., torch.Tensor]]:
    """The CUDA kernel in every layout that this device has for [m, k] x [n, k]^T."""
    if not layout.supported(m, n, k):
        return {}
    cuda = import_module("anabranch.ops.fp8_linear.cuda")
    return {x.name: partial(cuda.multiply, wanted=x) for x in cuda.layouts(m, n, k)}


def _tiled(tiles: Sequence[Tile], m: int) -> Mapping[str, Callable[..., torch.Tensor]]:
    """The Triton kernel in these tiles, but those made for more than four times as many tokens, or as few."""
    near = {tile.name: tile for tile in tiles if _near(tile.T, m)}
    if not near:
        return {}
    run = import_module("anabranch.ops.fp8_linear.triton").fp8_linear
    return {name: partial(run, tile=tile) for name, tile in near.items()}


def _near(tokens: int, m: int) -> bool:
    return min(m, 512) <= 4 * tokens and tokens <= max(16, 4 * m)


def _plain(device: torch.device) -> Callable[..., torch.Tensor]:
    first = next(i for i in IMPLEMENTATIONS["linear"] if i.verdict(None, device, False).ok)
    return import_module(f"anabranch.ops.linear.{first.name}").linear


def _check(x: torch.Tensor, w: Weight, coded: Mapping[str, Callable[..., torch.Tensor]], what: str) -> None:
    want = reference(x, w.codes, w.scale)
    with held_to(what):
        for arm, run in coded.items():
            FP8_LINEAR.equality.check(run(x, w.codes, w.scale), want, arm)
