"""Nsight Systems SQLite exports. Tables appear only when something filled them, and columns differ by version, so both
are looked up first; ids pack virtual machine, process and thread in one number (thread in the low 24 bits)."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from anabranch.evidence.trace.events import Event, Place, Range, Trace, ordered

_TABLES = {
    "kernel": "CUPTI_ACTIVITY_KIND_KERNEL",
    "memcpy": "CUPTI_ACTIVITY_KIND_MEMCPY",
    "memset": "CUPTI_ACTIVITY_KIND_MEMSET",
}
_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
_NEEDED = ("start", "end", "deviceId", "streamId")
_NVTX_RANGES = (59, 60)  # push/pop, start/end
_COPIES = {
    1: "HtoD",
    2: "DtoH",
    3: "HtoA",
    4: "AtoH",
    5: "AtoA",
    6: "AtoD",
    7: "DtoA",
    8: "DtoD",
    9: "HtoH",
    10: "PtoP",
}


def load_nsys(path: Path) -> Trace:
    """Kernels, copies and fills of every device and process, and NVTX ranges; ValueError in one line."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as base:
            return _Export(path, base).trace()
    except sqlite3.Error as error:
        raise ValueError(f"{path}: broken SQLite file ({error})") from None


class _Export:
    def __init__(self, path: Path, base: sqlite3.Connection) -> None:
        self.path, self.base = path, base
        tables = [row[0] for row in base.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")]
        self.columns = {
            table: {row[1] for row in base.execute(f'PRAGMA table_info("{table}")')}
            for table in tables
            if table.replace("_", "").isalnum()
        }
        self.strings: dict[int, str] = dict(self._rows("StringIds", "id", "value"))

    def trace(self) -> Trace:
        if "StringIds" not in self.columns:
            raise ValueError(f"{self.path}: no table StringIds: not an Nsight Systems export")
        self._refuse_whole_graphs()
        calls = self._calls()
        events = [event for kind in _TABLES for event in self._events(kind, calls)]
        if not events:
            raise ValueError(f"{self.path}: no kernels, copies or fills; record with: nsys profile --trace=cuda,nvtx")
        return Trace(
            source=str(self.path),
            format="nsys",
            events=ordered(events),
            ranges=list(self._ranges()),
            devices={int(number): str(name) for number, name in self._rows("TARGET_INFO_GPU", "id", "name")},
            notes=self._notes(),
        )

    def _refuse_whole_graphs(self) -> None:
        """A graph recorded as one row hides its kernels; such a trace would only show what ran outside graphs."""
        replays = self._count(_GRAPHS)
        if replays:
            raise ValueError(
                f"{self.path}: {replays} graph replays are one row each, without their kernels; "
                "record again with --cuda-graph-trace=node"
            )

    def _count(self, table: str) -> int:
        return self.base.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] if table in self.columns else 0

    def _rows(self, table: str, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Rows of a table, None for columns that this version of it lacks; nothing if there is no such table."""
        if table not in self.columns:
            return iter(())
        known = self.columns[table]
        chosen = ", ".join(f'"{column}"' if column in known else "NULL" for column in columns)
        return iter(self.base.execute(f'SELECT {chosen} FROM "{table}"'))

    def _calls(self) -> dict[tuple[int, int], tuple[int, int, bool]]:
        """(process, correlation) -> start, thread and whether it launched a graph."""
        calls = {}
        for start, thread, launch, name in self._rows(_RUNTIME, "start", "globalTid", "correlationId", "nameId"):
            if launch is not None:
                replay = "GraphLaunch" in self.strings.get(name, "")
                calls[(thread or 0) >> 24, launch] = (start, thread or 0, replay)
        return calls

    def _events(self, kind: str, calls: dict[tuple[int, int], tuple[int, int, bool]]) -> Iterator[Event]:
        table = _TABLES[kind]
        if missing := [column for column in _NEEDED if table in self.columns and column not in self.columns[table]]:
            raise ValueError(f"{self.path}: {table} has no column {missing[0]}; this export's version is not known")
        columns = (*_NEEDED, "globalPid", "correlationId", "graphNodeId", "demangledName", "shortName", "copyKind")
        for start, end, device, stream, process, launch, node, *named in self._rows(table, *columns):
            owner = (process or 0) >> 24
            called = calls.get((owner, launch))
            yield Event(
                name=self._name(kind, *named),
                kind=kind,
                start=start,
                end=end,
                place=Place(owner & 0xFFFFFF, device),
                stream=stream,
                launch=launch,
                launched=called[0] if called else None,
                thread=called[1] if called else None,
                node=node or None,
                graph=bool(node) or bool(called and called[2]),
            )

    def _name(self, kind: str, demangled: int | None, brief: int | None, copy: int | None) -> str:
        if kind == "kernel":
            return self.strings.get(demangled or 0) or self.strings.get(brief or 0) or "unnamed kernel"
        return "Memset" if kind == "memset" else f"Memcpy {_COPIES.get(copy or 0, 'of kind ' + str(copy))}"

    def _ranges(self) -> Iterator[Range]:
        columns = ("start", "end", "eventType", "text", "textId", "globalTid")
        for start, end, kind, text, text_id, thread in self._rows("NVTX_EVENTS", *columns):
            if end is not None and kind in _NVTX_RANGES:
                yield Range(text or self.strings.get(text_id, ""), start, end, thread)

    def _notes(self) -> tuple[str, ...]:
        """What the recorder itself warned of, such as events that it lost."""
        labels = self._rows("ENUM_DIAGNOSTIC_SEVERITY_LEVEL", "id", "name", "label")
        bad = {number for number, *words in labels if any(w in str(words).lower() for w in ("warn", "error"))}
        warned = [text for text, level in self._rows("DIAGNOSTIC_EVENT", "text", "severity") if level in bad and text]
        return tuple(f"nsys: {' '.join(text.split())}" for text in warned[:5])
