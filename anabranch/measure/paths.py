"""Times of the projection paths of one layer: the prologue alone, and an MLA layer with its gate."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path as File
from typing import Any, cast

import torch

from anabranch.config.model import LayerKind
from anabranch.layers.mla import MlaLayer
from anabranch.measure.gate import check_mla, check_prologue, take_all
from anabranch.measure.subject import Decodes, Subject, cold, force, latent_bytes, prologues
from anabranch.measure.timing import READ_BYTES_PER_S, Stopwatch, Timed, floor_us, interleave, trace
from anabranch.ops.linear.spec import floor as linear_floor

LEAST_CALLS = 40  # in one graph: a replay must be long beside its own launch


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One case: samples of every path, floor, bytes that must be read, and the class that equality was checked in."""

    bench: str
    case: Mapping[str, Any]
    timed: Timed
    gemms: Mapping[str, int]
    moved_bytes: int
    floor_us: float
    equality: str

    def rows(self) -> Iterator[dict[str, Any]]:
        """One result row an arm."""
        for arm, us in self.timed.us.items():
            middle = self.timed.median(arm)
            yield {
                "bench": self.bench,
                "case": dict(self.case),
                "arm": arm,
                "us": [round(t, 3) for t in us],
                "us_median": round(middle, 3),
                "floor_us": round(self.floor_us, 3),
                "floor_bytes_per_s": READ_BYTES_PER_S,
                "gbs": round(self.moved_bytes / middle / 1e3, 1),
                "gemms": self.gemms[arm],
                "aa_spread_pct": round(self.timed.spread_pct, 3),
                "equality": self.equality,
            }


def bench_prologue(
    subject: Subject, kind: LayerKind, rows: Sequence[int], *, graph: bool, trace_file: File | None = None
) -> Iterator[Result]:
    """Every path of a layer kind's projections, weights cold. An MLA gate joins at once: no attention is there.

    A path that leaves a product to the decode step is left out: `bench kda-decode --only chain` and `tune` time it with
    its step.

    Raises:
        GateRedError: before anything is timed.
    """
    paths = {name: path for name, path in subject.paths(kind).items() if path.complete}
    layers = cold(lambda: subject.layer(kind))
    first: Any = layers[0]
    equality = {m: check_prologue(subject, first, paths, m) for m in rows}
    calls = _calls(len(layers)) if graph else len(layers)

    def rotate(path: Any, x: torch.Tensor) -> None:
        for i in range(calls):
            take_all(path.run(layers[i % len(layers)].prologue.weights, x))

    buffers = [b.buffer for b in first.prologue.weights.merged.parts]
    buffers += [first.second.buffer] if kind == "kda" else []
    for m in rows:
        x = subject.hidden(m)
        runs = {name: partial(rotate, path, x) for name, path in paths.items()}
        if trace_file is not None:
            trace(runs, subject.device, trace_file)
            trace_file = None
        floors = [linear_floor(m, b.shape[0], b.shape[1], b.element_size()) for b in buffers]
        moved = sum(f.bytes for f in floors)
        yield Result(
            bench="prologue",
            case={"kind": kind, "m": m} | _where(subject, graph),
            timed=_interleave(runs, calls, subject, graph),
            gemms={name: path.gemms for name, path in paths.items()},
            moved_bytes=moved,
            floor_us=floor_us(moved, sum(f.flops for f in floors), READ_BYTES_PER_S),
            equality=equality[m],
        )


def bench_mla_gate(
    subject: Subject,
    rows: Sequence[int],
    contexts: Sequence[int],
    *,
    graph: bool,
    tokens: int | None = None,
    trace_file: File | None = None,
) -> Iterator[Result]:
    """Every path of the whole MLA layer in decode, for each M x context: the gate may run beside the attention.

    Args:
        tokens: most latent rows of one case; cases above are left out.

    Raises:
        GateRedError: before anything is timed.
        ValueError: the model's MLA has no output gate.
    """
    if not subject.config.mla.output_gate:
        raise ValueError(f"{subject.config.architecture} has no MLA output gate")
    paths, layers = subject.paths("mla"), cold(lambda: cast(MlaLayer, subject.layer("mla")))
    sizes = [(m, c) for m in rows for c in contexts if tokens is None or m * c <= tokens]
    decodes = Decodes(subject, max(rows), max(m * c for m, c in sizes))
    cases = [(m, c, decodes.batch(m, c, graph)) for m, c in sizes]
    forced, first = prologues(layers, "mla"), layers[0]
    equality = [check_mla(subject, first, paths, decodes, batch) for _, _, batch in cases]
    calls = _calls(len(layers)) if graph else len(layers)

    def rotate(name: str, x: torch.Tensor, batch: Any) -> None:
        force(forced, paths[name])
        for i in range(calls):
            layers[i % len(layers)](x, batch, decodes.cache.layers[-1])

    weights = sum(p.numel() * p.element_size() for p in first.parameters())
    for (m, context, batch), held_to in zip(cases, equality, strict=True):
        x = subject.hidden(m)
        runs = {name: partial(rotate, name, x, batch) for name in paths}
        if trace_file is not None:
            trace(runs, subject.device, trace_file)
            trace_file = None
        moved = weights + latent_bytes(subject, m, context) + 2 * x.numel() * x.element_size()
        yield Result(
            bench="mla_gate",
            case={"kind": "mla", "m": m, "context": context} | _where(subject, graph),
            timed=_interleave(runs, calls, subject, graph),
            gemms={name: path.gemms for name, path in paths.items()},
            moved_bytes=moved,
            floor_us=floor_us(moved, bytes_per_s=READ_BYTES_PER_S),
            equality=held_to,
        )


def _calls(sets: int) -> int:
    return sets * max(1, LEAST_CALLS // sets)


def _where(subject: Subject, graph: bool) -> dict[str, Any]:
    parallel = subject.build.parallel
    return {
        "architecture": subject.config.architecture,
        "attention_tp": parallel.attn_tp_size,
        "dtype": str(subject.build.dtype).removeprefix("torch."),
        "graph": graph,
        "deterministic": subject.deterministic,
        "linear": subject.selection.chosen["linear"][0],
    }


def _interleave(runs: Mapping[str, Callable[[], None]], calls: int, subject: Subject, graph: bool) -> Timed:
    return interleave(
        {name: partial(Stopwatch, run, calls, subject.device, graph) for name, run in runs.items()},
    )
