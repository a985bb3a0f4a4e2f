"""Measures every legal path inside a four-layer chain and writes the cost table that the plan chooses by."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from anabranch.config.model import LayerKind
from anabranch.fusion.costs import FORMAT, Cell, read_table, shape_key
from anabranch.layers.batch import Batch
from anabranch.measure.gate import check_kda, check_mla, check_prologue
from anabranch.measure.rows import clocks, provenance
from anabranch.measure.subject import Decodes, Subject, cold, force, prologues
from anabranch.measure.timing import Stopwatch, interleave

KINDS: tuple[LayerKind, ...] = ("kda", "mla")
ROWS = (1, 4, 8, 16, 32, 64, 128, 512)
CONTEXTS = (512, 4096, 32768, 131072)
# beyond 4M latent rows (4.8 GB) attention takes over a millisecond and the gate is a few percent of it
MOST_TOKENS = 1 << 22
CALLS = 4  # chains in one replay; each reads more weights than the L2 holds
NOISE = 5.0  # percent; in graphs an H200 stays below 2.4, eager passes wait for the host and differ by up to 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """One cell is done, or was found in the file: its number, how many there are, its times, and whether the file has
    it; a cell whose A/A says nothing is not written."""

    number: int
    total: int
    cell: Cell
    us: Mapping[str, float]
    spread_us: float
    reused: bool
    kept: bool


def cells(
    subject: Subject,
    graphs: Sequence[bool],
    rows: Sequence[int],
    contexts: Sequence[int],
    tokens: int = MOST_TOKENS,
    kinds: Sequence[LayerKind] = KINDS,
) -> list[Cell]:
    """What to measure: KDA at the shortest context, which its paths do not depend on; MLA, if gated, at every one."""
    dtype = str(subject.build.dtype).removeprefix("torch.")
    config, attn_tp, found = subject.config, subject.build.parallel.attn_tp_size, []
    differing: list[LayerKind] = [kind for kind in kinds if kind == "kda" or config.mla.output_gate]
    for graph in graphs:
        for kind in differing:
            for m in rows:
                for context in sorted(contexts)[: 1 if kind == "kda" else None]:
                    if m * context <= tokens or context == min(contexts):
                        cell = Cell(
                            kind=kind,
                            shape=shape_key(config, kind, attn_tp, dtype),
                            graph=graph,
                            deterministic=subject.deterministic,
                            rows=m,
                            context=context,
                        )
                        found.append(cell)
    return found


class TableFile:
    """A cost table on disk that grows cell by cell, so that a run that is cut short can be taken up again."""

    def __init__(self, path: Path, run: Mapping[str, Any]) -> None:
        """Opens `path` or starts it.

        Raises:
            ValueError: the file is not a cost table, or one of another device.
        """
        self.path = path
        self._document: dict[str, Any] = {"format": FORMAT, "device": run["device"], "runs": [], "cells": []}
        if path.exists():
            table = read_table(path)
            if table.device != run["device"]:
                raise ValueError(f"cost table {path} was measured on {table.device}, this is {run['device']}")
            self._document = json.loads(path.read_text(encoding="utf-8"))
        self.known = {Cell(**{name: raw[name] for name in Cell.__slots__}): raw for raw in self._document["cells"]}
        self._run = dict(run)
        self._number = len(self._document["runs"])

    def add(self, cell: Cell, us: Mapping[str, float], spread_us: float) -> None:
        """Keep one cell, instead of an older one; the file on disk is whole at every moment."""
        if self._number == len(self._document["runs"]):
            self._document["runs"].append(self._run | {"clocks": clocks()})
        rounded = {path: round(value, 3) for path, value in us.items()}
        self.known[cell] = asdict(cell) | {"us": rounded, "spread_us": round(spread_us, 3), "run": self._number}
        self._document["cells"] = list(self.known.values())
        temporary = self.path.with_name(self.path.name + ".part")
        temporary.write_text(self._text(), encoding="utf-8")
        os.replace(temporary, self.path)

    def _text(self) -> str:
        """One line a run and a cell: a table is read by people and by diff."""
        head = "".join(f' "{name}": {json.dumps(self._document[name])},\n' for name in ("format", "device"))
        lists = (
            f' "{name}": [\n  ' + ",\n  ".join(json.dumps(raw) for raw in self._document[name]) + "\n ]"
            for name in ("runs", "cells")
        )
        return "{\n" + head + ",\n".join(lists) + "\n}\n"


def tune(
    subject: Subject,
    out: Path,
    *,
    graphs: Sequence[bool],
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = CONTEXTS,
    tokens: int = MOST_TOKENS,
    kinds: Sequence[LayerKind] = KINDS,
    seconds: float = 600.0,
    samples: int = 7,
    noise: float = NOISE,
    command: Sequence[str] | None = None,
) -> Iterator[Progress]:
    """Measure what `out` lacks, cell by cell, and stop after `seconds`: the next run goes on where this one ended.

    A cell is measured again where a path that is allowed now has no time in it.

    Args:
        graphs: of True (replayed from a CUDA graph) and False (eager).
        tokens: most latent rows of one MLA cell; cells above are left out.
        kinds: layer kinds to measure.
        noise: largest A/A spread, in percent of the default path's time, of a cell that is written.

    Raises:
        GateRedError: a path differs from the separate one.
        ValueError: `out` is not a cost table of this device, or none of `kinds` has paths to choose from.
    """
    wanted = cells(subject, graphs, rows, contexts, tokens, kinds)
    if not wanted:
        raise ValueError(f"{subject.config.architecture} has no MLA output gate: there is no MLA path to choose")
    ops = {name: implementation for name, (implementation, _) in subject.selection.chosen.items()}
    settings = {"layers": "3 KDA + 1 MLA", "calls": CALLS, "samples": 3 * samples, "ops": ops}
    file = TableFile(out, provenance(subject.device, command) | settings)
    bench: _Bench | None = None
    deadline = time.monotonic() + seconds
    for number, cell in enumerate(wanted, 1):
        old = file.known.get(cell, {"us": {}})
        reused = set(subject.paths(_kind(cell))) <= set(old["us"])
        if reused:
            us, spread, kept = old["us"], old["spread_us"], True
        elif time.monotonic() >= deadline:
            return
        else:
            bench = bench or _Bench(subject, max(rows), max(c.rows * c.context for c in wanted))
            us, spread = bench.measure(cell, samples)
            kept = spread <= noise / 100 * us[subject.default(_kind(cell))]
        if kept and not reused:
            file.add(cell, us, spread)
        yield Progress(number=number, total=len(wanted), cell=cell, us=us, spread_us=spread, reused=reused, kept=kept)


def _kind(cell: Cell) -> LayerKind:
    return "kda" if cell.kind == "kda" else "mla"


class _Bench:
    """Cold chains, their caches, and a correctness gate that is passed once for each number of rows."""

    def __init__(self, subject: Subject, rows: int, tokens: int) -> None:
        self.subject = subject
        self.chains = cold(subject.chain)
        self._prologues = {kind: prologues(self.chains, kind) for kind in KINDS}
        self.decodes = Decodes(subject, rows, tokens)
        self._green: set[tuple[str, int]] = set()

    def measure(self, cell: Cell, samples: int) -> tuple[dict[str, float], float]:
        """Median us of one chain by path of the cell's kind, the other kind on its default; and the A/A spread."""
        kind = _kind(cell)
        batch = self.decodes.batch(cell.rows, cell.context, cell.graph)
        if (kind, cell.rows) not in self._green:
            self._gate(kind, cell.rows, batch)
            self._green.add((kind, cell.rows))
        x = self.subject.hidden(cell.rows)
        default = self.subject.default(kind)
        names = sorted(self.subject.paths(kind), key=lambda name: name != default)
        arms = {name: partial(self._watch, kind, name, x, batch, cell.graph) for name in names}
        timed = interleave(arms, samples=samples)
        return {name: timed.median(name) for name in names}, timed.spread_us

    def _gate(self, kind: LayerKind, rows: int, batch: Batch) -> None:
        paths, chain = self.subject.paths(kind), self.chains[0]
        layer: Any = chain.layers[0 if kind == "kda" else -1]
        check_prologue(self.subject, layer, paths, rows)
        (check_kda if kind == "kda" else check_mla)(self.subject, layer, paths, self.decodes, batch)

    def _watch(self, kind: LayerKind, name: str, x: torch.Tensor, batch: Batch, graph: bool) -> Stopwatch:
        paths = {k: self.subject.paths(k)[self.subject.default(k)] for k in KINDS}
        paths[kind] = self.subject.paths(kind)[name]
        return Stopwatch(self._run(paths, x, batch), CALLS, self.subject.device, graph)

    def _run(self, paths: Mapping[Any, Any], x: torch.Tensor, batch: Batch) -> Callable[[], None]:
        def run() -> None:
            for kind, path in paths.items():
                force(self._prologues[kind], path)
            for i in range(CALLS):
                self.chains[i % len(self.chains)](x, batch, self.decodes.cache.layers)

        return run
