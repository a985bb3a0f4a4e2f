"""The documented cases of the KDA decode step, in the order in which they are measured."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from anabranch.measure.arms import ArmTimes
from anabranch.measure.kda_chain import bench_kda_chain
from anabranch.measure.kda_decode import Case, bench_kda_decode

Pair = tuple[int, ...]
_12, _32, _96 = ([(heads, batch) for batch in (1, 8, 32, 64, 128)] for heads in (12, 32, 96))


@dataclass(frozen=True, slots=True)
class Section:
    """Cases of (heads, batch), and what runs them."""

    pairs: Sequence[Pair]
    run: Callable[[torch.device, Sequence[Pair], bool], Iterator[ArmTimes]]


def _steps(
    device: torch.device,
    pairs: Sequence[Pair],
    variants: bool,
    *,
    tokens: Sequence[int] = (1,),
    state: torch.dtype = torch.float32,
    f_b: bool = False,
) -> Iterator[ArmTimes]:
    cases = [Case(heads=h, batch=b, tokens=t, state=state, f_b=f_b) for t in tokens for h, b in pairs]
    return bench_kda_decode(device, cases, variants=variants)


SECTIONS: Mapping[str, Section] = {
    "step": Section([*_12, *_32[:3], _32[4], *_96[:3], _96[4]], _steps),
    "f-b": Section([*_12[:3], _12[4], _96[0], _96[1]], partial(_steps, f_b=True)),
    "tokens": Section([_12[0], _12[1], _12[2], _32[1]], partial(_steps, tokens=(2, 4))),
    "bf16": Section([*_12[:3], _12[4], _96[2]], partial(_steps, state=torch.bfloat16)),
    "chain": Section(_12[:4], lambda device, pairs, variants: bench_kda_chain(device, pairs)),
}


def bench_sections(
    device: torch.device, names: Sequence[str], pairs: Sequence[Pair] | None = None, *, variants: bool = False
) -> Iterator[ArmTimes]:
    """The named sections one after the other, on `pairs` or else their own.

    `variants`: every compiled variant of `step` and `bf16` instead of the other ways to run a step.

    Raises:
        GateRedError: an arm gives other values than the reference.
        ValueError: a section without that name.
    """
    for name in names:
        if name not in SECTIONS:
            raise ValueError(f"only={name!r}: accepted are {', '.join(SECTIONS)}")
    for name in names:
        yield from SECTIONS[name].run(device, pairs or SECTIONS[name].pairs, variants)
