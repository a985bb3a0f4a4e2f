"""torch.profiler's Chrome JSON. Times there are decimal microseconds; read as text, they keep every nanosecond."""

import json
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from anabranch.evidence.trace.events import CPU, Event, Place, Range, Trace, ordered

_KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
_RUNTIME = ("cuda_runtime", "cuda_driver")
_NODE_KEYS = ("graph node id", "graph_node_id", "graphNodeId")


def load_chrome(path: Path, content: bytes, on: str = "auto") -> Trace:
    """GPU events with the host calls that launched them, or the outermost host operations of a CPU trace."""
    try:
        document = json.loads(content, parse_float=str)
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    rows = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise ValueError(f"{path}: no list 'traceEvents': not a Chrome trace")
    complete = [row for row in rows if isinstance(row, dict) and row.get("ph") == "X" and "ts" in row]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for row in complete:
        by_kind.setdefault(str(row.get("cat", "")).lower(), []).append(row)
    events = [] if on == "cpu" else list(_gpu_events(by_kind))
    notes = ()
    if not events and on != "gpu":
        events = list(_host_events(by_kind.get("cpu_op", [])))
        notes = ("host operations, the outermost of each nest; no GPU events are in use",)
    if not events:
        raise ValueError(f"{path}: no {'host operations' if on == 'cpu' else 'GPU events'} in {len(rows)} rows")
    named = document.get("deviceProperties", []) if isinstance(document, dict) else []
    return Trace(
        source=str(path),
        format="torch.profiler",
        events=ordered(events),
        ranges=[_range(row) for row in by_kind.get("user_annotation", [])],
        devices={int(d["id"]): str(d.get("name", "")) for d in named if isinstance(d, dict) and "id" in d},
        notes=notes,
    )


def _gpu_events(by_kind: dict[str, list[dict[str, Any]]]) -> Iterator[Event]:
    calls = {_launch(row): row for kind in _RUNTIME for row in by_kind.get(kind, []) if _launch(row) is not None}
    for category, kind in _KINDS.items():
        for row in by_kind.get(category, []):
            arguments = row.get("args", {})
            launch = _launch(row)
            call = calls.get(launch)
            start, end = _span(row)
            node = next((int(arguments[key]) for key in _NODE_KEYS if arguments.get(key)), None)
            yield Event(
                name=str(row["name"]),
                kind=kind,
                start=start,
                end=end,
                place=Place(0, int(arguments.get("device", row.get("pid", 0)))),
                stream=int(arguments.get("stream", row.get("tid", 0))),
                launch=launch,
                launched=_ns(call["ts"]) if call else None,
                thread=_number(call.get("tid")) if call else None,
                node=node,
                graph=node is not None or (call is not None and "GraphLaunch" in str(call["name"])),
            )


def _host_events(rows: Iterable[dict[str, Any]]) -> Iterator[Event]:
    """Operations that no other one called: with those inside them the same time would count at every level."""
    reach: dict[Any, int] = {}
    for start, end, row in sorted(((*_span(row), row) for row in rows), key=lambda span: (span[0], -span[1])):
        place = row.get("pid"), row.get("tid")
        if start < reach.get(place, start):
            continue
        reach[place] = end
        process, thread = map(_number, place)
        yield Event(
            name=str(row["name"]),
            kind="cpu_op",
            start=start,
            end=end,
            place=Place(process or 0, CPU),
            stream=thread or 0,
            launched=start,
            thread=thread,
        )


def _range(row: dict[str, Any]) -> Range:
    return Range(str(row["name"]), *_span(row), _number(row.get("tid")))


def _span(row: dict[str, Any]) -> tuple[int, int]:
    start = _ns(row["ts"])
    return start, start + _ns(row.get("dur", 0))


def _ns(microseconds: str | int) -> int:
    return round(Decimal(microseconds) * 1000)


def _launch(row: dict[str, Any]) -> int | None:
    value = row.get("args", {}).get("correlation")
    return int(value) if value else None


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None
