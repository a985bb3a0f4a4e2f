"""Figures of slices: each with its spread over all of them, a row for every kernel, and what changed between arms."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from anabranch.evidence.trace.slice import Cut


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Median and extremes of `count` samples: ns for times, else a number."""

    count: int
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        return cls(count=len(samples), median=median(samples), low=min(samples), high=max(samples))


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """One figure of every arm; `unit` is "us" (samples in ns) or "". `about`: what it means, for readers."""

    name: str
    unit: str
    about: str
    arms: tuple[Spread, ...]

    @property
    def change_pct(self) -> float | None:
        """The last arm's median against the first one's; None without two arms or from nothing."""
        first, last = self.arms[0].median, self.arms[-1].median
        return None if len(self.arms) < 2 or not first else (last / first - 1) * 100


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRow:
    """One kernel in every arm: launches a slice, time of all of them and of one; None: not in that arm."""

    name: str
    kind: str
    count: tuple[int, ...]
    total: tuple[Spread | None, ...]
    one: tuple[Spread | None, ...]

    @property
    def change(self) -> float:
        """The last arm's median time a slice less the first one's, ns."""
        ends = [spread.median if spread else 0.0 for spread in (self.total[0], self.total[-1])]
        return ends[1] - ends[0]


def measures(cuts: Sequence[Cut]) -> list[Measure]:
    """Wall time first: where streams overlap, summed time says nothing about speed."""
    ns = [
        ("slice, wall", "opening to closing", lambda c: [s.wall for s in c.slices]),
        ("slices of a step together, wall", "", lambda c: c.wall_in_steps()),
        ("whole step, wall", "first start to last end", lambda c: c.wall_of_steps()),
        ("slice, summed", "all launches, overlap counted twice", lambda c: [s.summed for s in c.slices]),
        ("slice, overlap", "summed less what the launches cover", lambda c: [s.overlap for s in c.slices]),
        ("slice, idle", "nothing of the slice runs", lambda c: [s.idle for s in c.slices]),
    ]
    plain = [
        ("slices of a step", "", lambda c: [len(c.slices) / len({s.step for s in c.slices})]),
        ("launches of a slice", "kernels, copies and fills", lambda c: [len(s.events) for s in c.slices]),
        ("kernels of a slice", "", lambda c: [sum(e.kind == "kernel" for e in s.events) for s in c.slices]),
        ("streams of a slice", "", lambda c: [s.streams for s in c.slices]),
        ("launches of a step", "", lambda c: [len(step) for step in c.steps]),
        ("graph nodes of a step", "launched by a replay", lambda c: [sum(e.graph for e in step) for step in c.steps]),
    ]
    return [
        Measure(name=name, unit=unit, about=about, arms=tuple(Spread.of(take(cut)) for cut in cuts))
        for unit, group in (("us", ns), ("", plain))
        for name, about, take in group
    ]


def kernel_rows(cuts: Sequence[Cut]) -> list[KernelRow]:
    """By how much a kernel's time changed, the most first; for one arm by its time."""
    sides = [dict(_by_name(cut)) for cut in cuts]
    rows = []
    for key in dict.fromkeys(key for side in sides for key in side):
        found = [side.get(key) for side in sides]
        rows.append(
            KernelRow(
                name=key[0],
                kind=key[1],
                count=tuple(f[0] if f else 0 for f in found),
                total=tuple(f[1] if f else None for f in found),
                one=tuple(f[2] if f else None for f in found),
            )
        )
    weight = (lambda r: abs(r.change)) if len(cuts) > 1 else (lambda r: r.total[0].median if r.total[0] else 0.0)
    return sorted(rows, key=lambda row: (-weight(row), row.name))


def _by_name(cut: Cut) -> Iterator[tuple[tuple[str, str], tuple[int, Spread, Spread]]]:
    totals: dict[tuple[str, str], list[int]] = defaultdict(list)
    single: dict[tuple[str, str], list[int]] = defaultdict(list)
    for piece in cut.slices:
        here: dict[tuple[str, str], int] = defaultdict(int)
        for event in piece.events:
            here[event.name, event.kind] += event.took
            single[event.name, event.kind].append(event.took)
        for key, took in here.items():
            totals[key].append(took)
    for key, took in single.items():
        yield key, (len(took) // len(cut.slices), Spread.of(totals[key]), Spread.of(took))
