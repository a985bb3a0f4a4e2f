"""Ways to run one operation, timed beside each other: inputs take turns, a gate comes first, rows come out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from anabranch.measure.gate import GateRedError
from anabranch.measure.rows import clocks
from anabranch.measure.timing import COPY_BYTES_PER_S, Stopwatch, Timed, floor_us, interleave
from anabranch.ops.spec import Floor

COLD_BYTES = 330 << 20  # inputs rotate over more than six times the L2 of an H200
ROUNDS, SAMPLES = 3, 5
Inputs = TypeVar("Inputs")


@dataclass(frozen=True, slots=True)
class Least:
    """What one call must move, in bytes, and how long an H200 takes for that, in us."""

    bytes: int
    us: float

    @classmethod
    def of(cls, floor: Floor, bytes_per_s: float = COPY_BYTES_PER_S) -> "Least":
        return cls(floor.bytes, floor_us(floor.bytes, floor.flops, bytes_per_s))

    def __add__(self, other: "Least") -> "Least":
        return Least(self.bytes + other.bytes, self.us + other.us)


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmTimes:
    """One case: samples and floor of every arm, the class that equality was checked in, and the clocks afterwards."""

    bench: str
    case: Mapping[str, Any]
    timed: Timed
    least: Mapping[str, Least]
    equality: str
    clocks: str | None

    def rows(self) -> Iterator[dict[str, Any]]:
        """One result row an arm."""
        for arm, us in self.timed.us.items():
            middle, least = self.timed.median(arm), self.least[arm]
            yield {
                "bench": self.bench,
                "case": dict(self.case),
                "arm": arm,
                "us": [round(t, 3) for t in us],
                "us_median": round(middle, 3),
                "floor_us": round(least.us, 3),
                "gbs": round(least.bytes / middle / 1e3, 1),
                "aa_spread_pct": round(self.timed.spread_pct, 2),
                "equality": self.equality,
                "clocks": self.clocks,
            }


def time_arms(
    bench: str,
    case: Mapping[str, Any],
    arms: Mapping[str, Callable[[Inputs], Any]],
    sets: Sequence[Inputs],
    device: torch.device,
    *,
    least: Mapping[str, Least],
    equality: str,
    calls: int,
) -> ArmTimes:
    """Every arm over `sets` in turn, `calls` times or more: replayed from one graph on CUDA; A/A is the first arm's."""
    rounds = -(-calls // len(sets))

    def rotate(arm: Callable[[Inputs], Any]) -> None:
        for _ in range(rounds):
            for inputs in sets:
                arm(inputs)

    graph = device.type == "cuda"
    watches = {
        name: partial(Stopwatch, partial(rotate, arm), rounds * len(sets), device, graph) for name, arm in arms.items()
    }
    timed = interleave(watches, rounds=ROUNDS, samples=SAMPLES)
    return ArmTimes(bench=bench, case=case, timed=timed, least=least, equality=equality, clocks=clocks())


def sets_for(moved_bytes: int, cold: int = COLD_BYTES) -> int:
    """How many sets of inputs it takes so that one is out of the cache when its turn comes again."""
    return max(1, -(-cold // moved_bytes))


@contextmanager
def held_to(what: str) -> Iterator[None]:
    """Equality that is asserted in the block decides whether anything is timed: GateRedError names `what`."""
    try:
        yield
    except AssertionError as error:
        raise GateRedError(f"{what}: {error}") from None
