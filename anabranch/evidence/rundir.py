"""A run directory: everything one comparison measured, in files that are written once and can be read again.

    spec.toml                    copy of what was asked for
    provenance.json              where it ran, on what, from which commits
    requests/<arm>-<n>.jsonl     one raw row a request
    exact/<arm>-<n>.jsonl        one row a fixed input
    accuracy/<arm>-<n>.jsonl     one row a question
    counters/<arm>-<n>.json      what the server counted; written last, so it marks the run as finished
    logs/<arm>-<n>.log           output of the server
    summary.json                 everything a report shows

A crash leaves the finished runs, which are not run again. Files appear whole (temporary name, rename) or not at all.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from anabranch.evidence.record import RequestRow

FORMAT = "anabranch-run/1"
CONTROL = "control"
SUMMARY = "summary.json"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunName:
    """One measured run: `label` is its place in the schedule ("A1"), `slot` its files ("separate-1")."""

    label: str
    arm: str
    slot: str
    phase: str = "ab"


@dataclass(frozen=True, kw_only=True)
class ArmInfo:
    """One arm as it was asked for: a command that starts a server, or the URL of a running one."""

    name: str
    command: str | None = None
    url: str | None = None
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Figures of one run, under the names of `vllm bench serve`; `phase` is "ab" or "control" (A against A)."""

    run: str
    arm: str
    metrics: dict[str, Any]
    phase: str = "ab"
    file: str = ""
    counters: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Control:
    """How far the same arm differs from itself in the primary metric, percent: the largest over all A/A pairs."""

    metric: str
    spread_pct: float
    pairs_pct: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One metric, arm B against arm A.

    `a` and `b` are pooled over all requests. `ratio` is B over A from the geometric mean of adjacent pairs, and the
    interval is around it; `pooled_ratio` is b / a. `verdict`: faster, slower, no difference shown, screening, void.
    `smallest_effect_pct`: a difference that this run would have found four times out of five.
    """

    metric: str
    unit: str
    better: str
    a: float
    b: float
    ratio: float
    ci_low: float
    ci_high: float
    verdict: str
    smallest_effect_pct: float
    pooled: bool = True
    pooled_ratio: float = float("nan")
    pairs: list[float] = field(default_factory=list)
    spread_pct: float = float("nan")
    confidence: float = 0.99
    primary: bool = False


@dataclass(frozen=True, kw_only=True)
class Summary:
    """summary.json."""

    title: str
    created: str
    provenance: dict[str, Any]
    arms: list[ArmInfo]
    schedule: list[str]
    runs: list[RunResult]
    control: Control | None = None
    comparison: list[Comparison] = field(default_factory=list)
    exact: dict[str, Any] = field(default_factory=dict)
    accuracy: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    format: str = FORMAT

    def to_json(self) -> dict[str, Any]:
        """A document; figures that are not finite become null."""
        return _plain(asdict(self))

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Summary":
        """From a document of this format; unknown keys are left out, null figures become NaN.

        Raises:
            ValueError: another format, or a key is missing.
        """
        if document.get("format") != FORMAT:
            raise ValueError(f"format {document.get('format')!r}: accepted is {FORMAT!r}")
        try:
            parts = {
                "arms": [_make(ArmInfo, item) for item in document["arms"]],
                "runs": [_make(RunResult, item) for item in document["runs"]],
                "control": _make(Control, document["control"]) if document.get("control") else None,
                "comparison": [_make(Comparison, item) for item in document.get("comparison", [])],
            }
            return _make(cls, {**document, **parts})
        except (KeyError, TypeError) as error:
            raise ValueError(f"summary is incomplete: {error}") from None


def _make(kind: type[T], item: Mapping[str, Any]) -> T:
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    values = {name: value for name, value in item.items() if name in known}
    for name, value in values.items():
        if value is None and known[name].type is float:
            values[name] = float("nan")
    return kind(**values)


def _plain(value: Any) -> Any:
    """The same value without NaN and infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


class RunDir:
    """Reads and writes one run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def start(cls, path: Path, spec: str) -> "RunDir":
        """A new directory, or the one that was started with the same spec.

        Raises:
            ValueError: the directory holds something else, or was started with another spec.
        """
        kept = path / "spec.toml"
        if kept.exists():
            if kept.read_text(encoding="utf-8") != spec:
                raise ValueError(f"{path}: was started with another spec; give a new directory")
        elif path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ValueError(f"{path}: is not empty and no run directory (it has no spec.toml)")
        self = cls(path)
        self._write(kept, spec)
        return self

    @classmethod
    def open(cls, path: Path) -> "RunDir":
        """An existing directory.

        Raises:
            ValueError: there is neither a spec.toml nor a summary.json.
        """
        if not (path / "spec.toml").is_file() and not (path / SUMMARY).is_file():
            raise ValueError(f"{path}: no run directory (neither spec.toml nor {SUMMARY})")
        return cls(path)

    def file(self, kind: str, slot: str) -> Path:
        """Where a run keeps `requests`, `exact`, `accuracy`, `counters` or `logs`."""
        return self.path / kind / f"{slot}.{ {'counters': 'json', 'logs': 'log'}.get(kind, 'jsonl') }"

    def finished(self, slot: str) -> bool:
        """Whether a run has been measured to its end."""
        return self.file("counters", slot).is_file()

    def write_rows(self, kind: str, slot: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """One JSON line a row."""
        self._write(self.file(kind, slot), "".join(json.dumps(_plain(row)) + "\n" for row in rows))

    def read_rows(self, kind: str, slot: str) -> list[dict[str, Any]]:
        """The rows of a run; none if it kept none."""
        path = self.file(kind, slot)
        if not path.is_file():
            return []
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def read_requests(self, slot: str) -> list[RequestRow]:
        """The raw requests of a run, in the order in which they were sent."""
        return [RequestRow.from_json(row) for row in self.read_rows("requests", slot)]

    def finish(self, slot: str, counters: Mapping[str, Any]) -> None:
        """Write what the server counted, which marks the run as measured."""
        self._write(self.file("counters", slot), json.dumps(_plain(counters), indent=1))

    def read_counters(self, slot: str) -> dict[str, Any]:
        """What `finish` wrote."""
        return json.loads(self.file("counters", slot).read_text(encoding="utf-8"))

    def write_provenance(self, provenance: Mapping[str, Any]) -> None:
        """provenance.json."""
        self._write(self.path / "provenance.json", json.dumps(_plain(provenance), indent=1))

    def read_provenance(self) -> dict[str, Any]:
        """provenance.json, or nothing."""
        path = self.path / "provenance.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def write_summary(self, summary: Summary) -> None:
        """summary.json."""
        self._write(self.path / SUMMARY, json.dumps(summary.to_json(), indent=1))

    def read_summary(self) -> Summary:
        """summary.json.

        Raises:
            ValueError: there is none, or it is not of this format.
        """
        path = self.path / SUMMARY
        if not path.is_file():
            raise ValueError(f"{self.path}: has no {SUMMARY} yet; no run has finished")
        try:
            return Summary.from_json(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".part")
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
