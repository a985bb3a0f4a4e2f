"""From raw projection rows to what a prefill kernel reads: the producer layouts against the chain of operations.

`chain` is convolution, two norms, sigmoid, rounding and the copy of v, as the layer and the adapter of fla-core run
them; `chain + pack` hands un-normed strided tensors to one packing launch. The others are layouts of ops/kda_inputs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from anabranch.measure.arms import ArmTimes, Least, held_to, sets_for, time_arms
from anabranch.ops.arithmetic import sigmoid
from anabranch.ops.conv.tile import TILE, Tile, parse
from anabranch.ops.conv.triton import conv
from anabranch.ops.kda_inputs.spec import KDA_INPUTS, Layout, floor
from anabranch.ops.kda_inputs.triton import kda_inputs
from anabranch.ops.norm.triton import l2_norm
from anabranch.ops.pack.triton import pack
from anabranch.ops.segments import Segments
from anabranch.ops.spec import BITWISE

D, CALLS = 128, 4


class Rows(NamedTuple):
    """What a convolution reads: x [T, 3P] and logits [T, H] are slices of one merged projection."""

    x: torch.Tensor
    segments: Segments
    slots: torch.Tensor
    pool: torch.Tensor
    weight: torch.Tensor
    logits: torch.Tensor


Arm = Callable[[Rows], tuple[torch.Tensor, ...]]


def chain(rows: Rows) -> tuple[torch.Tensor, ...]:
    """q and k normed and rounded, v dense, sigmoid of beta: a launch each."""
    q, k, v = _convolved(rows)
    return l2_norm(q).to(q.dtype), l2_norm(k).to(k.dtype), v.contiguous(), sigmoid(rows.logits.float())


def conv_and_pack(rows: Rows) -> tuple[torch.Tensor, ...]:
    """q, k, v and beta dense, un-normed."""
    return pack((*_convolved(rows), rows.logits))


def producer(layout: Layout, tile: Tile = TILE) -> Arm:
    """The convolution that writes this layout itself."""
    return lambda rows: kda_inputs(*rows, layout=layout, tile=tile)


ARMS: dict[str, Arm] = {
    "rounded": producer("rounded"),
    "normed": producer("normed"),
    "grouped": producer("grouped"),
    "chain": chain,
    "chain + pack, no norm": conv_and_pack,
}


def bench_conv(device: torch.device, cases: Sequence[tuple[int, ...]], tiles: Sequence[str] = ()) -> Iterator[ArmTimes]:
    """Cases of (heads, tokens, segments); `tiles` as ops/conv/tile.py names them, each an arm of the grouped layout.

    Raises:
        GateRedError: the layout that replaces the chain differs from it, or a tile shows in the bits.
        ValueError: a tile that is none, or tokens that do not divide into the segments.
    """
    tiled = {f"grouped {tile.name}": producer("grouped", tile) for tile in map(parse, tiles)}
    for heads, tokens, segments in cases:
        yield _case(device, heads, tokens, segments, tiled)


def _convolved(rows: Rows) -> list[torch.Tensor]:
    heads = (rows.logits.shape[1], D)
    return [part.unflatten(-1, heads) for part in conv(*rows[:5]).chunk(3, -1)]


def _rows(device: torch.device, heads: int, tokens: int, count: int, weight: torch.Tensor) -> Rows:
    width = heads * D
    wide = torch.randn(tokens, 4 * width + D + heads + -heads % 16, device=device).bfloat16()
    logits = wide[:, 4 * width + D : 4 * width + D + heads]
    pool = torch.randn(count, 3, 3 * width, device=device).bfloat16()
    segments = Segments.of([tokens // count] * count, device=device)
    return Rows(wide[:, : 3 * width], segments, torch.arange(count, device=device), pool, weight, logits)


def _case(device: torch.device, heads: int, tokens: int, count: int, tiled: Mapping[str, Arm]) -> ArmTimes:
    if tokens % count:
        raise ValueError(f"cases={heads}x{tokens}x{count}: need tokens that divide into the segments")
    weight = torch.randn(3 * heads * D, 4, device=device) * 0.3
    sets = [_rows(device, heads, tokens, count, weight) for _ in range(sets_for(floor(tokens, heads).bytes // 2))]
    _check(sets[0], tiled)
    arms = {**ARMS, **tiled}
    return time_arms(
        "conv",
        {"heads": heads, "tokens": tokens, "segments": count},
        arms,
        sets,
        device,
        least={name: Least.of(floor(tokens, heads, 4 if name == "normed" else 2)) for name in arms},
        equality=KDA_INPUTS.equality.kind,
        calls=CALLS,
    )


def _check(rows: Rows, tiled: Mapping[str, Arm]) -> None:
    pools = rows.pool.clone(), rows.pool.clone()
    with held_to("conv"):
        want = chain(rows._replace(pool=pools[0]))
        got = ARMS["rounded"](rows._replace(pool=pools[1]))
        for name, a, b in zip(("q", "k", "v", "beta"), got, want, strict=True):
            KDA_INPUTS.equality.check(a, b, name)
        assert torch.equal(*pools), "windows differ"
        plain = ARMS["grouped"](rows._replace(pool=rows.pool.clone()))
        for tile, arm in tiled.items():
            for name, a, b in zip(
                ("q", "k", "v", "beta"), arm(rows._replace(pool=rows.pool.clone())), plain, strict=True
            ):
                BITWISE.check(a, b, f"{tile}: {name}")
