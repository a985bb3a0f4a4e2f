"""Slices as a document (JSON), a table (CSV) and a picture for Perfetto or chrome://tracing."""

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from anabranch.evidence.trace.events import Event, short
from anabranch.evidence.trace.slice import Cut, Slice
from anabranch.evidence.trace.table import Spread, kernel_rows, measures

FORMAT = "anabranch-trace/1"


def lanes(events: Iterable[Event]) -> list[tuple[Event, int]]:
    """A lane for each event of one stream, so that no two of a lane overlap and no viewer draws them as nested.

    Each takes the lowest lane that is free when it starts; one that starts as another ends may follow it.
    """
    free: list[int] = []
    placed = []
    for event in sorted(events, key=lambda e: (e.start, e.end)):
        lane = next((n for n, until in enumerate(free) if until <= event.start), len(free))
        free[lane : lane + 1] = [event.end]
        placed.append((event, lane))
    return placed


def tracks(piece: Slice) -> list[dict[str, Any]]:
    """Streams of a slice as they start, each with its lanes; times are ns from the slice's opening."""
    by_stream: dict[int, list[Event]] = defaultdict(list)
    for event in piece.events:
        by_stream[event.stream].append(event)
    found = []
    for stream, events in by_stream.items():
        placed = lanes(events)
        boxes = [
            {"name": e.name, "kind": e.kind, "start": e.start - piece.start, "took": e.took, "lane": lane}
            for e, lane in placed
        ]
        found.append({"stream": stream, "lanes": 1 + max(lane for _, lane in placed), "events": boxes})
    return found


def document(cuts: Sequence[Cut], labels: Sequence[str]) -> dict[str, Any]:
    """Everything that was found, times in ns; `labels` name the arms. The representative slices keep their events."""
    return {
        "format": FORMAT,
        "arms": [_arm(cut, label) for cut, label in zip(cuts, labels, strict=True)],
        "measures": [{**asdict(measure), "change_pct": measure.change_pct} for measure in measures(cuts)],
        "kernels": [{**asdict(row), "change": row.change} for row in kernel_rows(cuts)],
    }


def _arm(cut: Cut, label: str) -> dict[str, Any]:
    shown = cut.representative
    return {
        "label": label,
        "source": cut.source,
        "device": str(cut.place),
        "device_name": cut.device,
        "marker": cut.marker,
        "until": cut.until,
        "steps": len(cut.steps),
        "steps_are": cut.how,
        "slices": len(cut.slices),
        "notes": list(cut.notes),
        "wall": [piece.wall for piece in cut.slices],
        "shown": {"step": shown.step, "index": shown.index, "wall": shown.wall, "tracks": tracks(shown)},
    }


def to_csv(cuts: Sequence[Cut], labels: Sequence[str]) -> str:
    """A row a kernel, microseconds; the columns of each arm carry its label."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    figures = ("count", "total_us", "total_us_low", "total_us_high", "launch_us")
    writer.writerow(["kernel", "kind", *(f"{label}_{f}" for label in labels for f in figures), "delta_us"])
    for row in kernel_rows(cuts):
        cells = chain.from_iterable(_cells(*side) for side in zip(row.count, row.total, row.one, strict=True))
        writer.writerow([row.name, row.kind, *cells, f"{row.change / 1e3:.3f}" if len(cuts) > 1 else ""])
    return out.getvalue()


def _cells(count: int, total: Spread | None, one: Spread | None) -> list[str]:
    if total is None or one is None:
        return ["0", "", "", "", ""]
    return [str(count), *(f"{ns / 1e3:.3f}" for ns in (total.median, total.low, total.high, one.median))]


def perfetto(cuts: Sequence[Cut], labels: Sequence[str]) -> dict[str, Any]:
    """The representative slices, a process an arm, all starting at 0, a thread a lane of a stream."""
    rows: list[dict[str, Any]] = []
    for number, (cut, label) in enumerate(zip(cuts, labels, strict=True), start=1):
        rows.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": label}})
        rows.append({"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}})
        thread = 0
        for track in tracks(cut.representative):
            for lane in range(track["lanes"]):
                thread += 1
                rows += _lane(track, lane, number, thread)
    return {"displayTimeUnit": "ns", "traceEvents": rows}


def _lane(track: dict[str, Any], lane: int, process: int, thread: int) -> list[dict[str, Any]]:
    where = {"pid": process, "tid": thread}
    name = f"stream {track['stream']}" + (f" +{lane}" if lane else "")
    named = [
        {"ph": "M", "name": "thread_name", **where, "args": {"name": name}},
        {"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": thread}},
    ]
    return named + [
        {
            "ph": "X",
            "name": short(box["name"]),
            "cat": box["kind"],
            **where,
            "ts": box["start"] / 1e3,
            "dur": box["took"] / 1e3,
            "args": {"name": box["name"]},
        }
        for box in track["events"]
        if box["lane"] == lane
    ]
