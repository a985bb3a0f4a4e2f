"""`anabranch plan --explain`: the measured times behind every choice of path."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anabranch.config.fusion import FusionConfig
    from anabranch.config.model import ModelConfig
    from anabranch.parallel.layout import Layout


def measured_document(
    config: "ModelConfig", layout: "Layout", fusion: "FusionConfig", dtype: str
) -> list[dict[str, Any]]:
    """Every measured cell of this model and layout, by device, mode and layer kind, with the path it takes."""
    from anabranch.fusion.plan import explain

    return [
        {
            "device": found.device,
            "deterministic": found.deterministic,
            "source": found.source,
            "kind": found.choice.kind,
            "default": found.choice.path,
            "cells": [asdict(decision) for decision in found.choice.costs.decisions()],
        }
        for found in explain(config, fusion, dtype, layout.rank(0))
        if found.choice.costs is not None
    ]


def print_measured(console: Any, measured: list[dict[str, Any]]) -> None:
    """One table for each device, mode and layer kind."""
    if not measured:
        console.print("\nno measured times for this model and layout: run `anabranch tune`, or name a --fusion table=")
    for found in measured:
        _print_one(console, found)


def _print_one(console: Any, found: dict[str, Any]) -> None:
    from rich.table import Table

    mode = ", deterministic" if found["deterministic"] else ""
    console.print(f"\n{found['kind'].upper()} measured on {found['device']}{mode}, us a four-layer chain")
    console.print(f"  {found['source']}; default {found['default']}; * is taken")
    if any(cell["context"] is None for cell in found["cells"]):
        console.print("  any: the most us that a path loses at one of the contexts; what a graph freezes")
    paths = list(dict.fromkeys(path for cell in found["cells"] for path in cell["us"]))
    table = Table("  ", "M", "context", *paths, "A/A", box=None, padding=(0, 2, 0, 0))
    for cell in found["cells"]:
        times = [_time(cell, path) for path in paths]
        mode, context = "graph" if cell["graph"] else "eager", cell["context"]
        where = "any" if context is None else f"{context}"
        table.add_row(f"  {mode}", f"{cell['rows']}", where, *times, f"{cell['spread_us']:.1f}")
    console.print(table)


def _time(cell: dict[str, Any], path: str) -> str:
    taken = "*" if path == cell["path"] else ""
    return f"{taken}{cell['us'][path]:.1f}" if path in cell["us"] else "-"
