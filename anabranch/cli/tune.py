"""`anabranch tune`: measures the projection paths on this machine and writes the table that `auto` chooses by."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anabranch.cli import options
from anabranch.cli.bench import Config, DpAttention, Tp, numbers, open_subject

if TYPE_CHECKING:
    from anabranch.measure.tune import Progress

_MODES = {"both": (True, False), "graph": (True,), "eager": (False,)}


def tune(
    config: Config,
    out: Annotated[Path, typer.Option(help="The table: made, or completed where it lacks cells.")],
    tp: Tp = 1,
    dp_attention: DpAttention = 1,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    deterministic: options.Deterministic = False,
    op: options.Op = None,
    mode: Annotated[str, typer.Option(help="both, graph or eager [default: both on CUDA, else eager]")] = "",
    rows: Annotated[str, typer.Option(help="Numbers of tokens M.")] = "1,4,8,16,32,64,128,512",
    contexts: Annotated[str, typer.Option(help="Tokens in the cache of each request.")] = "512,4096,32768,131072",
    samples: Annotated[int, typer.Option(help="Replays a round and arm; there are three rounds.", min=1)] = 7,
    seconds: Annotated[float, typer.Option(help="Stop after this long; the same command then goes on.")] = 240.0,
) -> None:
    """Measure every projection path of a model in a four-layer chain, and write a cost table for `--fusion table=`."""
    import torch

    from anabranch.measure.gate import GateRedError
    from anabranch.measure.tune import tune as run

    subject = open_subject(config, tp, dp_attention, device, dtype, deterministic, op)
    graphs = _graphs(mode, subject.device.type)
    start, last = time.monotonic(), None
    cells = run(
        subject,
        out,
        graphs=graphs,
        rows=numbers("rows", rows),
        contexts=numbers("contexts", contexts),
        samples=samples,
        seconds=seconds,
        command=["anabranch", *sys.argv[1:]],
    )
    try:
        with torch.inference_mode():
            for last in cells:
                typer.echo(f"{_line(last)}  ({time.monotonic() - start:.0f} s)", err=True)
    except GateRedError as error:
        typer.echo(f"gate red, nothing is timed: {error}", err=True)
        raise typer.Exit(1) from None
    if last is None or last.number < last.total:
        done = f"{last.number} of {last.total}" if last else "no"
        typer.echo(f"{out}: {done} cells after {seconds:g} s; run the same command again to go on")
        return
    typer.echo(f"{out}: {last.total} cells; use it with --fusion table={out}, read it with plan --explain")


def _graphs(mode: str, device: str) -> tuple[bool, ...]:
    if mode and mode not in _MODES:
        raise ValueError(f"mode={mode!r}: accepted are {', '.join(_MODES)}")
    if device != "cuda" and mode in ("both", "graph"):
        raise ValueError(f"mode={mode!r}: {device} has no graphs; accepted is eager")
    return _MODES[mode or ("both" if device == "cuda" else "eager")]


def _line(progress: "Progress") -> str:
    cell = progress.cell
    where = f"{cell.kind} {'graph' if cell.graph else 'eager'} M={cell.rows} context={cell.context}"
    times = ", ".join(f"{path} {us:.1f}" for path, us in progress.us.items())
    known = " (was there)" if progress.reused else ""
    return f"[{progress.number}/{progress.total}] {where}: {times} us, A/A {progress.spread_us:.1f} us{known}"
