"""Measured times of the projection paths, and the path that they make the one to take.

A table is JSON, written by `anabranch tune` for one device. Each cell holds, for one layer kind and shape, one number
of rows and one context length, the microseconds that a chain of layers took with each path, and how far two timings of
the same path lay apart (A/A). `tables/*.json` ships with the package; `--fusion table=FILE` names another table.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from anabranch.config.model import LayerKind, ModelConfig

FORMAT = "anabranch-costs/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Where times were taken: `rows` tokens, each with `context` tokens before it, replayed from a graph or eager."""

    kind: str
    shape: str
    graph: bool
    deterministic: bool
    rows: int
    context: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Microseconds of one chain by path, and the A/A difference below which no path is faster than another."""

    us: Mapping[str, float]
    spread_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CostTable:
    """All cells measured on one device; `runs` says when, by which commit and command."""

    device: str
    runs: tuple[Mapping[str, Any], ...]
    cells: Mapping[Cell, Times]
    source: str

    def select(self, kind: str, shape: str, deterministic: bool) -> dict[Cell, Times]:
        """The cells of one layer kind and shape in one mode."""
        wanted = (kind, shape, deterministic)
        return {c: t for c, t in self.cells.items() if (c.kind, c.shape, c.deterministic) == wanted}


def shape_key(config: ModelConfig, kind: LayerKind, attn_tp: int, dtype: str) -> str:
    """Everything of a layer's shape that its times depend on; layouts with equal keys share their cells."""
    if kind == "kda":
        gate = "full" if config.kda.full_rank_gate else "low"
        return f"hidden={config.hidden_size} heads={config.kda.heads // attn_tp}x{config.kda.head_dim} {gate} {dtype}"
    mla = config.mla
    query = f"q_lora={mla.q_lora_rank}" if mla.q_lora_rank else "q"
    widths = f"{query} qk={mla.qk_dim} kv={mla.latent_dim} v={mla.v_dim}{' gated' * mla.output_gate}"
    return f"hidden={config.hidden_size} heads={mla.heads // attn_tp} {widths} {dtype}"


def device_name(device: torch.device) -> str:
    """The name that tables carry: the GPU's, or "cpu"; for shapes without memory, that of the machine at hand."""
    if device.type == "cuda" or (device.type == "meta" and torch.cuda.is_available()):
        return torch.cuda.get_device_properties(0 if device.type == "meta" else device).name
    return "cpu"


def read_table(path: Path) -> CostTable:
    """A table from a file.

    Raises:
        ValueError: not readable, not JSON, or not this format; the message names the file and the fault.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cost table {path}: {getattr(error, 'strerror', None) or error}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"cost table {path}: not JSON, {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise ValueError(f"cost table {path}: format {found!r}, accepted is {FORMAT!r}")
    try:
        cells = dict(_cell(raw) for raw in document["cells"])
        return CostTable(device=document["device"], runs=tuple(document["runs"]), cells=cells, source=str(path))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"cost table {path}: {type(error).__name__} {error}") from None


def _cell(raw: Mapping[str, Any]) -> tuple[Cell, Times]:
    cell = Cell(**{name: raw[name] for name in Cell.__slots__})
    us = {path: float(value) for path, value in raw["us"].items()}
    if cell.rows < 1 or cell.context < 1 or not us or min(us.values()) <= 0:
        raise ValueError(f"a cell with rows={cell.rows}, context={cell.context}, us={us}")
    return cell, Times(us=us, spread_us=float(raw["spread_us"]))


@cache
def shipped_tables() -> tuple[CostTable, ...]:
    """The tables in the package."""
    folder = resources.files("anabranch.fusion") / "tables"
    if not folder.is_dir():
        return ()
    found = sorted((f for f in folder.iterdir() if f.name.endswith(".json")), key=lambda f: f.name)
    with_paths = []
    for file in found:
        with resources.as_file(file) as path:
            with_paths.append(read_table(path))
    return tuple(with_paths)


def join_tables(tables: Iterable[CostTable], device: str) -> CostTable | None:
    """All that is known about one device, or None."""
    mine = [t for t in tables if t.device == device]
    if not mine:
        return None
    cells = {cell: times for t in mine for cell, times in t.cells.items()}
    source = ", ".join(t.source for t in mine)
    return CostTable(device=device, runs=tuple(r for t in mine for r in t.runs), cells=cells, source=source)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The path taken in one cell, or in a graph that must serve every context there is (`context` None)."""

    graph: bool
    rows: int
    context: int | None
    path: str
    us: Mapping[str, float]
    spread_us: float


class Costs:
    """The cells of one layer kind, shape and mode, as a choice of path.

    Rows and contexts fall into the next larger measured bucket, or the largest. `default` is held at the smallest rows;
    the path held is given up for the fastest one only where that wins by more than the A/A spread, and what is held at
    one number of rows is what the next starts from. So every choice is within the spread of the fastest path, and
    neighbouring buckets do not differ by noise. Where several contexts must be served by one choice, a path's time is
    the worst of its losses against the fastest path of each context.
    """

    def __init__(self, cells: Mapping[Cell, Times], default: str, legal: Sequence[str]) -> None:
        self.default = default
        self._grid: dict[bool, dict[int, dict[int, Times]]] = {}
        for cell, times in sorted(cells.items(), key=lambda item: (item[0].rows, item[0].context)):
            us = {path: value for path, value in times.us.items() if path in legal}
            if default in us:  # without the default's time nothing is known to be faster
                by_rows = self._grid.setdefault(cell.graph, {})
                by_rows.setdefault(cell.rows, {})[cell.context] = Times(us=us, spread_us=times.spread_us)
        self._contexts = {g: sorted({c for known in rows.values() for c in known}) for g, rows in self._grid.items()}
        self._taken: dict[tuple[int, int, bool], dict[int, str]] = {}

    def __bool__(self) -> bool:
        return bool(self._grid)

    def pick(self, rows: int, least: int, most: int, graph: bool) -> str:
        """The path for `rows` tokens whose longest context lies in least .. most."""
        grid = self._grid.get(graph)
        if not grid:
            return self.default
        least, most = (bucket(self._contexts[graph], context) for context in (least, most))
        taken = self._taken.get((least, most, graph))
        if taken is None:
            taken = self._taken[least, most, graph] = dict(self._walk(grid, least, most))
        return taken[bucket(list(grid), rows)]

    def _walk(self, grid: Mapping[int, Mapping[int, Times]], least: int, most: int) -> Iterator[tuple[int, str]]:
        held = self.default
        for rows, contexts in grid.items():
            known = list(contexts)
            first, last = bucket(known, least), bucket(known, most)
            lost, spread = _losses([contexts[c] for c in known if first <= c <= last])
            fastest = min(lost, key=lambda path: lost[path])
            if held not in lost or lost[held] - lost[fastest] > spread:
                held = fastest
            yield rows, held

    def decisions(self) -> Iterator[Decision]:
        """Every measured cell with the path it takes; before each row of graph cells the choice for all contexts."""
        for graph, grid in self._grid.items():
            for rows, contexts in grid.items():
                if graph and len(contexts) > 1:
                    lost, spread = _losses(list(contexts.values()))
                    path = self.pick(rows, min(contexts), max(contexts), True)
                    yield Decision(graph=True, rows=rows, context=None, path=path, us=lost, spread_us=spread)
                for context, times in contexts.items():
                    path = self.pick(rows, context, context, graph)
                    yield Decision(
                        graph=graph, rows=rows, context=context, path=path, us=times.us, spread_us=times.spread_us
                    )

    def summary(self) -> str:
        """One line: what graphs over every context and eager passes take, by rows."""
        parts = []
        for graph, grid in sorted(self._grid.items(), reverse=True):
            steps: list[list[Any]] = []
            most = max(c for contexts in grid.values() for c in contexts)
            for rows in grid:
                path = self.pick(rows, 1, most, graph)
                if steps and steps[-1][0] == path:
                    steps[-1][1] = rows
                else:
                    steps.append([path, rows])
            bounds = [f"{path} to M={rows}" for path, rows in steps[:-1]] + [steps[-1][0]]
            parts.append(f"{'in graphs' if graph else 'eager'} {', then '.join(bounds)}")
        return "; ".join(parts)

    @property
    def paths(self) -> tuple[str, ...]:
        """Every path that some pass may take, the default first where it is one of them."""
        taken = {decision.path: None for decision in self.decisions()}
        if set(self._grid) != {False, True}:
            taken[self.default] = None
        return tuple(sorted(taken, key=lambda path: path != self.default))


def bucket(measured: Sequence[int], value: int) -> int:
    """The smallest of `measured` (ascending) that is not below `value`, or the largest."""
    return next((m for m in measured if m >= value), measured[-1])


def _losses(cells: Sequence[Times]) -> tuple[dict[str, float], float]:
    """For each path timed in all cells the most us it loses to the fastest, and the largest spread."""
    shared = set.intersection(*(set(t.us) for t in cells))
    lost = {p: max(t.us[p] - min(t.us.values()) for t in cells) for p in cells[0].us if p in shared}
    return lost, max(t.spread_us for t in cells)
