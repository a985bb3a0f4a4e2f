"""What repeats in a trace: ranges that the user names, replays of one graph, or the whole trace as one step."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from anabranch.evidence.trace.events import Event, Range, Trace, pattern

Step = Sequence[Event]


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Steps in order of time, how they were found, and what was left out."""

    steps: Sequence[Step]
    how: str
    notes: tuple[str, ...] = ()


def find_steps(trace: Trace, step: str | None = None) -> Steps:
    """`step`: a pattern for host ranges; None looks for graph replays. The trace holds one place.

    A replay counts as a step of the kind that took the most time altogether; other kinds are left out, with a note.
    """
    if step is not None:
        return _by_range(trace, step)
    replays = _replays(trace)
    if replays:
        return _alike(replays, len(trace.events))
    return Steps(steps=[trace.events], how="the whole trace: no graph replays, and no range was named")


def wall(events: Step) -> int:
    """From the first start to the last end, ns."""
    return max(event.end for event in events) - events[0].start


def names(events: Step) -> Counter[str]:
    return Counter(event.name for event in events)


def _by_range(trace: Trace, text: str) -> Steps:
    """An event belongs to the innermost such range in which the host launched it."""
    wanted = pattern(text)
    ranges = sorted((r for r in trace.ranges if wanted.search(r.name)), key=lambda r: (r.start, -r.end))
    if not ranges:
        known = ", ".join(sorted({r.name for r in trace.ranges})[:8]) or "none at all"
        raise ValueError(f"step={text!r}: no range of that name in {trace.source}; there are {known}")
    starts = [r.start for r in ranges]
    reach = list(accumulate((r.end for r in ranges), max))
    found: dict[int, list[Event]] = defaultdict(list)
    for event in trace.events:
        moment = event.start if event.launched is None else event.launched
        at = bisect_right(starts, moment) - 1
        while at >= 0 and moment < reach[at] and not _holds(ranges[at], moment, event.thread):
            at -= 1
        if at >= 0 and moment < reach[at]:
            found[at].append(event)
    if not found:
        raise ValueError(f"step={text!r}: nothing was launched inside the {len(ranges)} ranges of that name")
    missed = len(trace.events) - sum(map(len, found.values()))
    notes = (f"{missed} of {len(trace.events)} launches lie outside the steps",) if missed else ()
    if len(found) < len(ranges):
        notes = (*notes, f"{len(ranges) - len(found)} of {len(ranges)} ranges launched nothing")
    steps = sorted(found.values(), key=lambda events: events[0].start)
    return Steps(steps=steps, how=f"ranges that match {text!r}", notes=notes)


def _holds(within: Range, moment: int, thread: int | None) -> bool:
    return moment < within.end and (thread is None or within.thread is None or thread == within.thread)


def _replays(trace: Trace) -> list[list[Event]]:
    by_launch: dict[int, list[Event]] = defaultdict(list)
    for event in trace.events:
        if event.graph and event.launch is not None:
            by_launch[event.launch].append(event)
    return list(by_launch.values())


def _alike(replays: list[list[Event]], launches: int) -> Steps:
    kinds: dict[frozenset[tuple[str, int]], list[list[Event]]] = defaultdict(list)
    for replay in replays:
        kinds[frozenset(names(replay).items())].append(replay)
    chosen = max(kinds.values(), key=lambda group: sum(map(wall, group)))
    notes = []
    if len(kinds) > 1:
        notes.append(f"{len(replays) - len(chosen)} replays of {len(kinds) - 1} other graphs are left out")
    outside = launches - sum(map(len, replays))
    if outside:
        notes.append(f"{outside} launches outside graphs are left out")
    steps = sorted(chosen, key=lambda events: events[0].start)
    return Steps(steps=steps, how=f"replays of one graph of {len(chosen[0])} nodes", notes=tuple(notes))
