"""Writes Nsight Systems SQLite exports with the tables and columns of a real one (schema of versions 2024 to 2025)."""

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

_COMMON = (
    "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, "
    "greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER"
)
_SCHEMA = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "TARGET_INFO_GPU": "vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT NOT NULL, busLocation TEXT NOT NULL",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{_COMMON}, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, "
    "mangledName INTEGER, launchType INTEGER, cacheConfig INTEGER, registersPerThread INTEGER NOT NULL, "
    "gridX INTEGER NOT NULL, gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL, "
    "blockY INTEGER NOT NULL, blockZ INTEGER NOT NULL, staticSharedMemory INTEGER NOT NULL, "
    "dynamicSharedMemory INTEGER NOT NULL, localMemoryPerThread INTEGER NOT NULL, localMemoryTotal INTEGER NOT NULL, "
    "gridId INTEGER NOT NULL, sharedMemoryExecuted INTEGER, graphNodeId INTEGER, sharedMemoryLimitConfig INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{_COMMON}, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL, "
    "deprecatedSrcId INTEGER, srcKind INTEGER, dstKind INTEGER, srcDeviceId INTEGER, srcContextId INTEGER, "
    "dstDeviceId INTEGER, dstContextId INTEGER, migrationCause INTEGER, graphNodeId INTEGER, virtualAddress INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{_COMMON}, value INTEGER NOT NULL, bytes INTEGER NOT NULL, graphNodeId INTEGER, "
    "memKind INTEGER",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"{_COMMON}, graphId INTEGER NOT NULL, graphExecId INTEGER NOT NULL",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, "
    "globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, "
    "callchainId INTEGER",
    "NVTX_EVENTS": "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, "
    "category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, "
    "domainId INTEGER, uint64Value INTEGER, jsonText TEXT",
    "ENUM_DIAGNOSTIC_SEVERITY_LEVEL": "id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT",
    "DIAGNOSTIC_EVENT": "timestamp INTEGER NOT NULL, timestampType INTEGER NOT NULL, source INTEGER NOT NULL, "
    "severity INTEGER NOT NULL, text TEXT NOT NULL, globalPid INTEGER",
}


@dataclass
class NsysFile:
    """Collects rows and writes only the tables that got some, as the exporter does.

    `without`: columns that an older version did not have. Times in ns.
    """

    process: int = 4242
    without: tuple[str, ...] = ()
    rows: dict[str, list[dict]] = field(default_factory=dict)
    _strings: dict[str, int] = field(default_factory=dict)
    _ids: count = field(default_factory=lambda: count(1))

    def kernel(self, name, start, took, *, stream=7, device=0, launch=None, node=None, process=None):
        """`launch` None: a launch of its own, by a host call 5 us earlier."""
        row = self._activity(start, took, stream, device, launch, node, process, "cudaLaunchKernel_v7000")
        self._add(
            "CUPTI_ACTIVITY_KIND_KERNEL", row | {"demangledName": self._string(name), "shortName": self._string(name)}
        )

    def copy(self, start, took, kind=8, *, stream=7, device=0, launch=None, node=None):
        row = self._activity(start, took, stream, device, launch, node, None, "cudaMemcpyAsync_v3020")
        self._add("CUPTI_ACTIVITY_KIND_MEMCPY", row | {"bytes": 4096, "copyKind": kind})

    def fill(self, start, took, *, stream=7, device=0, launch=None, node=None):
        row = self._activity(start, took, stream, device, launch, node, None, "cudaMemsetAsync_v3020")
        self._add("CUPTI_ACTIVITY_KIND_MEMSET", row | {"value": 0, "bytes": 64})

    def replay(self, start, took=4000, *, thread=9):
        """The host call that launches a graph; its nodes take the number that comes back as `launch`."""
        return self.call("cudaGraphLaunch_v10000", start, took, thread=thread)

    def call(self, name, start, took, *, thread=9, process=None):
        launch = next(self._ids)
        row = {"start": start, "end": start + took, "correlationId": launch, "nameId": self._string(name)}
        self._add("CUPTI_ACTIVITY_KIND_RUNTIME", row | {"globalTid": self._owner(process) | thread})
        return launch

    def whole_graph(self, start, took, launch, *, stream=7, device=0):
        """A replay as one row: what nsys records by default."""
        row = self._activity(start, took, stream, device, launch, None, None, "")
        self._add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", row | {"graphId": 1, "graphExecId": 2})

    def range(self, name, start, took, *, thread=9, kind=59, by_id=False):
        text = {"textId": self._string(name)} if by_id else {"text": name}
        row = {"start": start, "end": start + took, "eventType": kind, "globalTid": self._owner(None) | thread}
        self._add("NVTX_EVENTS", row | text)

    def gpu(self, device, name):
        self._add("TARGET_INFO_GPU", {"id": device, "name": name})

    def diagnostic(self, text, severity):
        levels = enumerate(("Unknown", "Info", "Warning", "Error"))
        self.rows["ENUM_DIAGNOSTIC_SEVERITY_LEVEL"] = [
            {"id": n, "name": label.upper(), "label": label} for n, label in levels
        ]
        self._add("DIAGNOSTIC_EVENT", {"text": text, "severity": severity})

    def write(self, path: Path) -> Path:
        self.rows["StringIds"] = [{"id": number, "value": text} for text, number in self._strings.items()]
        with closing(sqlite3.connect(path)) as base, base:
            for table, rows in self.rows.items():
                columns = [c.strip() for c in _SCHEMA[table].split(",") if c.strip().split()[0] not in self.without]
                base.execute(f"CREATE TABLE {table} ({', '.join(columns)})")
                names = [column.split()[0] for column in columns]
                needed = {column.split()[0] for column in columns if "NOT NULL" in column}
                values = [[row.get(n, 1 if n in needed else None) for n in names] for row in rows]
                base.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(names))})", values)
        return path

    def _activity(self, start, took, stream, device, launch, node, process, call):
        if launch is None:
            launch = self.call(call, start - 5000, 2000, process=process)
        place = {"deviceId": device, "streamId": stream, "globalPid": self._owner(process)}
        return {"start": start, "end": start + took, "correlationId": launch, "graphNodeId": node, **place}

    def _owner(self, process):
        return (1 << 48) | ((process or self.process) << 24)

    def _add(self, table, row):
        self.rows.setdefault(table, []).append(row)

    def _string(self, text):
        return self._strings.setdefault(text, len(self._strings) + 1)
