"""Cut the same piece out of every step of a trace, and say how long it took: on the wall, and summed over launches."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from anabranch.evidence.trace.events import Event, Place, Trace, pattern, short
from anabranch.evidence.trace.marker import exactly, find_marker
from anabranch.evidence.trace.steps import Step, Steps, find_steps, names, wall


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceSpec:
    """Where slices begin and end; patterns are regular expressions.

    A slice opens where a marker starts (`after`: where it ends) and closes where the next marker starts or, with
    `until`, where the next launch of that name does. `first` and `last` choose markers of each step, counted from 0:
    without `until` they are the two ends of one slice a step (`last` may be the number of markers: the step's end);
    with it, every marker in between opens one. `marker` None: found by itself.
    """

    marker: str | None = None
    first: int | None = None
    last: int | None = None
    until: str | None = None
    after: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Events that start inside [start, end) ns; `step` and `index` (of the marker) count from 0."""

    step: int
    index: int
    start: int
    end: int
    events: Sequence[Event]

    @property
    def wall(self) -> int:
        return self.end - self.start

    @property
    def summed(self) -> int:
        return sum(event.took for event in self.events)

    @property
    def overlap(self) -> int:
        """Time that the sum counts more than once, ns."""
        return self.summed - union((event.start, event.end) for event in self.events)

    @property
    def idle(self) -> int:
        """Time of the slice in which nothing of it ran, ns."""
        return self.wall - union((event.start, min(event.end, self.end)) for event in self.events)

    @property
    def streams(self) -> int:
        return len({event.stream for event in self.events})

    @property
    def nodes(self) -> int:
        """Launches by a graph replay."""
        return sum(event.graph for event in self.events)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Slices of one trace that hold the same launches, and the steps they were cut from.

    `marker`: the pattern that opens them, or the name if it was `found` without one.
    """

    source: str
    place: Place
    device: str
    marker: str
    until: str | None
    how: str
    steps: Sequence[Step]
    slices: Sequence[Slice]
    notes: tuple[str, ...] = ()
    found: bool = False

    @property
    def representative(self) -> Slice:
        """The slice whose wall time is nearest the median; the earlier of two that are equally near."""
        middle = median(piece.wall for piece in self.slices)
        return min(self.slices, key=lambda piece: abs(piece.wall - middle))

    def wall_of_steps(self) -> list[int]:
        return [wall(step) for step in self.steps]

    def wall_in_steps(self) -> list[int]:
        """Wall time of all slices of a step together, for each step that has as many as most."""
        count: Counter[int] = Counter(piece.step for piece in self.slices)
        usual = Counter(count.values()).most_common(1)[0][0]
        return [sum(s.wall for s in self.slices if s.step == step) for step in sorted(count) if count[step] == usual]


def cut(traces: Sequence[Trace], spec: SliceSpec, step: str | None = None) -> list[Cut]:
    """The same slices out of each trace, which must hold one place each (`Trace.on`). ValueError in one line."""
    if (spec.first is None) != (spec.last is None):
        raise ValueError("range: needs both ends, as in 0:4")
    found = [find_steps(trace, step) for trace in traces]
    if spec.marker is None:
        name = find_marker([steps.steps for steps in found])
        cuts = [_cut(trace, steps, exactly(name), spec) for trace, steps in zip(traces, found, strict=True)]
        return [replace(one, marker=name, found=True) for one in cuts]
    return [_cut(trace, steps, spec.marker, spec) for trace, steps in zip(traces, found, strict=True)]


def _cut(trace: Trace, found: Steps, marker: str, spec: SliceSpec) -> Cut:
    wanted = pattern(marker)
    marked = [
        (number, step, [event for event in step if wanted.search(event.name)])
        for number, step in enumerate(found.steps)
    ]
    if not any(marks for _, _, marks in marked):
        raise ValueError(
            f"marker={marker!r}: not in {trace.source}; its commonest launches are {_commonest(found.steps)}"
        )
    pieces = [piece for number, step, marks in marked if marks for piece in _slices(number, step, marks, spec)]
    if not pieces:
        raise ValueError(f"{trace.source}: no slice between {marker!r} and {spec.until!r}")
    kinds = Counter(frozenset(names(piece.events).items()) for piece in pieces)
    usual, count = kinds.most_common(1)[0]
    alike = [piece for piece in pieces if frozenset(names(piece.events).items()) == usual]
    notes = [*trace.notes, *found.notes]
    if bare := sum(not marks for _, _, marks in marked):
        notes.append(f"{bare} of {len(marked)} steps have no marker")
    if len(alike) < len(pieces):
        notes.append(f"{len(pieces) - count} of {len(pieces)} slices hold other launches and are left out")
    place = alike[0].events[0].place
    return Cut(
        source=trace.source,
        place=place,
        device=trace.devices.get(place.device, ""),
        marker=marker,
        until=spec.until,
        how=found.how,
        steps=found.steps,
        slices=alike,
        notes=tuple(notes),
    )


def _slices(number: int, step: Step, marks: Sequence[Event], spec: SliceSpec) -> Iterator[Slice]:
    starts = [event.start for event in step]
    done = max(event.end for event in step)
    for index, end in _bounds(step, marks, spec, done):
        start = marks[index].end if spec.after else marks[index].start
        events = step[bisect_left(starts, start) : len(step) if end == done else bisect_left(starts, end)]
        if events and end > start:
            yield Slice(step=number, index=index, start=start, end=end, events=events)


def _bounds(step: Step, marks: Sequence[Event], spec: SliceSpec, done: int) -> Iterator[tuple[int, int]]:
    """Index of the opening marker and the time at which the slice closes."""
    first, last = (0, len(marks)) if spec.first is None or spec.last is None else (spec.first, spec.last)
    if not 0 <= first < last <= len(marks):
        raise ValueError(
            f"range={first}:{last}: a step has {len(marks)} markers, accepted is 0 <= I < J <= {len(marks)}"
        )
    ends = [*(mark.start for mark in marks), done]
    if spec.until is not None:
        closing = pattern(spec.until)
        closers = [event.start for event in step if closing.search(event.name)]
        for index in range(first, last):
            at = bisect_left(closers, marks[index].start + 1)
            if at < len(closers):
                yield index, closers[at]
    elif spec.first is not None:
        yield first, ends[last]
    else:  # what follows the last marker of several ends with the step, not with a marker
        yield from ((index, ends[index + 1]) for index in range(max(1, len(marks) - 1)))


def _commonest(steps: Sequence[Step]) -> str:
    count = Counter(event.name for step in steps for event in step)
    return ", ".join(repr(short(name)) for name, _ in count.most_common(5))


def union(spans: Iterable[tuple[int, int]]) -> int:
    """Length of what the spans cover together."""
    covered, reach = 0, None
    for start, end in sorted(spans):
        if reach is None or start > reach:
            covered, reach = covered + max(0, end - start), max(start, end)
        elif end > reach:
            covered, reach = covered + end - reach, end
    return covered
