"""Times of a slice by projection path: wall time of graph replays first, then what it is made of."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path as File
from statistics import median
from typing import Any

import torch

from anabranch.layers.kda import KdaLayer
from anabranch.measure.gate import GateRedError, take_all
from anabranch.measure.launches import Launches, record
from anabranch.measure.path_arms import PathArm
from anabranch.measure.rows import clocks
from anabranch.measure.simulated_peers import Exchange, LinkModel
from anabranch.measure.slice import Ended, Slice
from anabranch.measure.timing import Stopwatch, Timed, interleave

CALLS = 4  # slices of one graph, one behind the other: its start is a small part of a replay
PROFILED = 3  # replays that are recorded
ROUNDS, SAMPLES = 3, 15


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceTimes:
    """All arms of one slice. `prologue`: the projections of its KDA layers alone, without neighbours; arms that leave a
    product to the decode step have none."""

    case: Mapping[str, Any]
    wall: Timed
    prologue: Timed
    launches: Mapping[str, Launches]
    equality: Mapping[str, str]
    moved_bytes: float
    floor_us: float
    exchanges: Sequence[Exchange]
    link: LinkModel
    clocks: str | None

    @property
    def exchange_us(self) -> float:
        """Modelled time of the collectives of a slice, in no other figure."""
        return sum(map(self.link.us, self.exchanges))

    def rows(self) -> Iterator[dict[str, Any]]:
        """One result row an arm."""
        not_executed = {
            "model": str(self.link),
            "exchanges": [[e.kind, e.ranks, e.bytes] for e in self.exchanges],
            "bytes_sent": sum(e.sent for e in self.exchanges),
            "us": round(self.exchange_us, 2),
        }
        for arm, us in self.wall.us.items():
            found = self.launches.get(arm)
            yield {
                "bench": "slice",
                "case": dict(self.case),
                "arm": arm,
                "us": [round(t, 3) for t in us],
                "us_median": round(self.wall.median(arm), 3),
                "floor_us": round(self.floor_us, 3),
                "gbs": round(self.moved_bytes / self.wall.median(arm) / 1e3, 1),
                "aa_spread_pct": round(self.wall.spread_pct, 3),
                "prologues_us": round(self.prologue.median(arm), 3) if arm in self.prologue.us else None,
                "prologues_aa_spread_pct": round(self.prologue.spread_pct, 3),
                "kernels_per_slice": found and found.kernels,
                "collectives_not_executed": not_executed,
                "equality": self.equality[arm],
                "clocks": self.clocks,
                **({} if found is None else {"profile": found.fields(24)}),
            }

    def lines(self) -> Iterator[str]:
        """For people; a difference inside the A/A spread is none."""
        base, case = next(iter(self.wall.us)), self.case
        yield (
            f"slice {case['architecture']} tp {case['tp']}, attention-TP {case['attention_tp']}, ep {case['ep']}: rows "
            f"{case['rows']} of {case['router_rows']}, context {case['context']}, {case['experts_touched']} local "
            f"experts ({case['experts']}) a layer; A/A {self.wall.spread_pct:.2f} %, floor {self.floor_us:.1f} us"
        )
        for arm in self.wall.us:
            us, found = self.wall.median(arm), self.launches.get(arm)
            prologue = f"{self.prologue.median(arm):7.1f}" if arm in self.prologue.us else "      -"
            gain = (1 - us / self.wall.median(base)) * 100
            told = "no difference" if abs(gain) <= self.wall.spread_pct else f"{gain:+.2f} %"
            kernels = "" if found is None else f", {found.kernels:.0f} kernels, summed {found.sum_us:.1f} us"
            yield (
                f"  {arm:14} {us:9.1f} us {'' if arm == base else told:13} three prologues {prologue} us{kernels}"
                f", {self.equality[arm]}"
            )
        yield (
            f"  not executed and in no time above: {len(self.exchanges)} collectives, "
            f"{sum(e.sent for e in self.exchanges) / 1e6:.2f} MB sent by a rank, modelled {self.exchange_us:.1f} us "
            f"({self.link})"
        )


def time_slice(subject: Slice, names: Sequence[str], link: LinkModel, traces: File | None = None) -> SliceTimes:
    """Every arm behind a correctness gate; the first one is the base and is also timed against itself.

    Args:
        traces: a folder that gets a recording of each arm's replays, ARM.json, on a GPU.

    Raises:
        GateRedError: an arm differs from the first, or a replay from what it was captured from.
        ValueError: an arm that this model cannot take, or a first one that leaves a product to the decode step.
    """
    arms = subject.arms(names)
    complete = {arm.name: arm for arm in arms if arm.kda is None or arm.kda.complete}
    if arms[0].name not in complete:
        raise ValueError(f"path {arms[0].name!r}: the first arm is the base, it must compute all projections")
    equality = subject.check(arms)
    touched = subject.touched()
    exchanges = subject.exchanges()
    watches: dict[str, Stopwatch] = {}
    wall = _interleave(subject, {arm.name: partial(_watch, subject, arm, watches) for arm in arms})
    subject.check_states()
    on_gpu = subject.device.type == "cuda"
    profiled = {}
    for name, watch in watches.items() if on_gpu else ():
        trace = None if traces is None else traces / f"{name}.json"
        profiled[name] = record(partial(watch.sample, PROFILED), PROFILED * CALLS, trace)
    prologue = _interleave(subject, {name: partial(_prologues, subject, arm) for name, arm in complete.items()})
    moved, floor = subject.floor(touched)
    return SliceTimes(
        case=subject.case(touched),
        wall=wall,
        prologue=prologue,
        launches=profiled,
        equality=equality,
        moved_bytes=moved,
        floor_us=floor,
        exchanges=exchanges,
        link=link,
        clocks=clocks() if on_gpu else None,
    )


def _interleave(subject: Slice, arms: Mapping[str, Callable[[], Stopwatch]]) -> Timed:
    try:
        return interleave(arms, rounds=ROUNDS, samples=SAMPLES)
    finally:
        subject.paths.restore()


def _watch(subject: Slice, arm: PathArm, kept: dict[str, Stopwatch]) -> Stopwatch:
    """`kept` gets the watch of each arm that is timed; the first arm's twin comes later and stays out of it."""
    outputs: list[Ended] = []

    def run() -> None:
        subject.paths.use(arm)
        outputs[:] = [subject.run(CALLS)]

    on_gpu = subject.device.type == "cuda"
    watch = Stopwatch(run, CALLS, subject.device, on_gpu)
    if on_gpu:
        _check_replay(subject, arm, watch, outputs[0])
    kept.setdefault(arm.name, watch)
    return watch


def _check_replay(subject: Slice, arm: PathArm, watch: Stopwatch, outputs: Ended) -> None:
    """From the same states a replay must write every value, and for most rows what the eager slices write.

    Not for all of them: a library may choose another algorithm under capture, and a last bit another expert.
    """
    both = (outputs.prefix, outputs.pending)
    for tensor in both:
        tensor.fill_(float("nan"))
    subject.rewind()
    watch.sample(1)
    got = [tensor.clone() for tensor in both]
    subject.rewind()
    subject.paths.use(arm)
    want = subject.run(CALLS)
    for name, a, b in zip(("sum", "update"), got, (want.prefix, want.pending), strict=True):
        if not a.isfinite().all():
            raise GateRedError(f"slice, {arm.name}, replayed: {name} has values that are not finite or not written")
        far = (a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1)
        if median(far.tolist()) > 0.02:
            raise GateRedError(f"slice, {arm.name}, replayed: half of the rows of {name} are over 2 % away from eager")


def _prologues(subject: Slice, arm: PathArm) -> Stopwatch:
    """The projections of the slice's KDA layers, each set of weights out of the cache when its turn comes."""
    layers = [m for m in subject.model.modules() if isinstance(m, KdaLayer)]
    inputs = [torch.randn_like(subject.inputs.prefix) for _ in layers]

    def run() -> None:
        subject.paths.use(arm)
        for _ in range(CALLS):
            for layer, x in zip(layers, inputs, strict=True):
                take_all(layer.prologue(x, subject.batch.moment))

    return Stopwatch(run, CALLS, subject.device, subject.device.type == "cuda")
