"""`anabranch bench`: times of single parts on this machine, beside the floor and behind a correctness gate."""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli import options

if TYPE_CHECKING:
    from anabranch.measure.paths import Result
    from anabranch.measure.subject import Subject

app = typer.Typer(
    help="Time parts of a model on this machine; nothing is timed that is not equal.", no_args_is_help=True
)

Config = Annotated[Path, typer.Argument(help="config.json, or the directory that holds it; weights are random.")]
Tp = Annotated[int, typer.Option(help="Ranks of one pipeline stage; the first one's shapes are timed.")]
DpAttention = Annotated[int, typer.Option(help="Attention replicas that share the tp ranks.")]
Eager = Annotated[bool, typer.Option("--eager", help="No CUDA graphs: launches by the host are part of the time.")]
Trace = Annotated[
    Path | None, typer.Option(help="Also write a Chrome trace of every arm at the first M, under NVTX ranges.")
]


@app.callback()
def _verbs() -> None:
    """Time parts of a model on this machine; nothing is timed that is not equal."""


@app.command()
def prologue(
    config: Config,
    kind: Annotated[str, typer.Option(help="Layer kind: kda or mla.")] = "kda",
    rows: Annotated[str, typer.Option(help="Numbers of tokens M.")] = "1,8,16,32,64,128,512",
    tp: Tp = 1,
    dp_attention: DpAttention = 1,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    eager: Eager = False,
    deterministic: options.Deterministic = False,
    op: options.Op = None,
    trace: Trace = None,
) -> None:
    """Projection paths of one layer, weights cold: every path beside `separate` and the floor."""
    if kind not in ("kda", "mla"):
        raise ValueError(f"kind={kind!r}: accepted are kda, mla")
    from anabranch.measure.paths import bench_prologue

    subject = open_subject(config, tp, dp_attention, device, dtype, deterministic, op)
    graph, tokens = subject.device.type == "cuda" and not eager, numbers("rows", rows)
    _report(subject, lambda: bench_prologue(subject, kind, tokens, graph=graph, trace_file=trace))


@app.command()
def mla_gate(
    config: Config,
    rows: Annotated[str, typer.Option(help="Numbers of requests M.")] = "1,4,16,64",
    contexts: Annotated[str, typer.Option(help="Tokens in the cache of each request.")] = "512,4096,32768,131072",
    tp: Tp = 1,
    dp_attention: DpAttention = 1,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    eager: Eager = False,
    deterministic: options.Deterministic = False,
    op: options.Op = None,
    trace: Trace = None,
) -> None:
    """A whole MLA layer in decode, by the path of its output gate, for each M and context."""
    from anabranch.measure.paths import bench_mla_gate

    subject = open_subject(config, tp, dp_attention, device, dtype, deterministic, op)
    graph, grid = subject.device.type == "cuda" and not eager, (numbers("rows", rows), numbers("contexts", contexts))
    _report(subject, lambda: bench_mla_gate(subject, *grid, graph=graph, trace_file=trace))


def open_subject(
    config: Path, tp: int, dp_attention: int, device: str, dtype: str, deterministic: bool, op: list[str] | None
) -> "Subject":
    """The first rank of a layout on a device; ValueError as in `Subject.open`."""
    from anabranch.measure.subject import Subject
    from anabranch.parallel.layout import Layout

    layout = Layout(tp=tp, dp_attention=dp_attention)
    ops = options.parse_ops(op or [])
    return Subject.open(config, layout=layout, device=device, dtype=dtype, deterministic=deterministic, ops=ops)


def numbers(name: str, text: str) -> list[int]:
    """From "1,8,32"."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{name}={text!r}: need positive numbers with commas between them")
    return sorted({int(part) for part in parts})


def _report(subject: "Subject", run: Any) -> None:
    """Lines for people, then one JSON document on the last line. A red gate is status 1, without a figure."""
    import torch

    from anabranch.measure.gate import GateRedError
    from anabranch.measure.rows import clocks, provenance

    results: list[Result] = []
    try:
        with torch.inference_mode():
            for result in run():
                if not results:
                    typer.echo(_head(result))
                results.append(result)
                typer.echo("\n".join(_lines(result, subject.device.type == "cuda")))
    except GateRedError as error:
        typer.echo(f"gate red, nothing is timed: {error}", err=True)
        raise typer.Exit(1) from None
    document = provenance(subject.device, ["anabranch", *sys.argv[1:]]) | {"clocks": clocks()}
    typer.echo(json.dumps(document | {"rows": [row for result in results for row in result.rows()]}))


def _head(result: "Result") -> str:
    case = result.case
    mode = "graph replay" if case["graph"] else "eager"
    return (
        f"{result.bench} {case['kind']}, {case['architecture']} attention-TP {case['attention_tp']}, {case['dtype']}, "
        f"{mode}, linear={case['linear']}\ngate green ({result.equality}); floors of an H200: 4.65 TB/s, 790 TFLOP/s"
    )


def _lines(result: "Result", on_gpu: bool) -> Iterable[str]:
    """The floor is a GPU's, so that a CPU is not held against it."""
    timed, case = result.timed, result.case
    context = f", context {case['context']}" if "context" in case else ""
    floor = f"floor {result.floor_us:.1f} us, " if on_gpu else ""
    yield f"M {case['m']}{context}: {floor}A/A {timed.spread_pct:.1f} %"
    yield from _arm_lines(result, on_gpu)


def _arm_lines(result: "Result", on_gpu: bool) -> Iterator[str]:
    separate = result.timed.median("separate")
    for arm in result.timed.us:
        us = result.timed.median(arm)
        gain = separate - us
        verdict = "  no difference" if abs(gain) <= result.timed.spread_us else f"  {separate / us:.2f}x separate"
        floor = f"{us / result.floor_us:6.2f}x floor " if on_gpu else ""
        rates = f"{floor}{result.moved_bytes / us / 1e3:7.0f} GB/s"
        yield f"  {arm:10} {result.gemms[arm]} GEMMs {us:9.1f} us {rates}{'' if arm == 'separate' else verdict}"
