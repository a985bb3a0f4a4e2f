"""`anabranch tune`: measures the projection paths on this machine and writes the table that `auto` chooses by."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli import options
from anabranch.cli.bench import Config, DpAttention, numbers, open_subject

if TYPE_CHECKING:
    from anabranch.config.model import LayerKind
    from anabranch.measure.tune import Progress

_KINDS: tuple["LayerKind", ...] = ("kda", "mla")
_MODES = {"both": (True, False), "graph": (True,), "eager": (False,)}


def tune(
    config: Config,
    out: Annotated[Path, typer.Option(help="The table: made, or completed where it lacks cells or paths.")],
    tp: Annotated[str, typer.Option(help="Ranks of one pipeline stage; several, as 1,2,4, one after the other.")] = "1",
    dp_attention: DpAttention = 1,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    deterministic: options.Deterministic = False,
    op: options.Op = None,
    mode: Annotated[str, typer.Option(help="both, graph or eager [default: both on CUDA, else eager]")] = "",
    kinds: Annotated[str, typer.Option(help="Layer kinds to measure.")] = "kda,mla",
    rows: Annotated[str, typer.Option(help="Numbers of tokens M.")] = "1,4,8,16,32,64,128,512",
    contexts: Annotated[str, typer.Option(help="Tokens in the cache of each request.")] = "512,4096,32768,131072",
    samples: Annotated[int, typer.Option(help="Replays a round and arm; there are three rounds.", min=1)] = 7,
    noise: Annotated[float, typer.Option(help="Drop cells whose A/A spread exceeds this many percent.", min=0)] = 5.0,
    seconds: Annotated[float, typer.Option(help="Stop after this long; the same command then goes on.")] = 240.0,
) -> None:
    """Measure every projection path of a model in a four-layer chain, and write a cost table for `--fusion table=`."""
    import torch

    from anabranch.measure.gate import GateRedError
    from anabranch.measure.tune import tune as run

    start, done = time.monotonic(), _Done()
    grid = {"rows": numbers("rows", rows), "contexts": numbers("contexts", contexts), "kinds": _kinds(kinds)}
    try:
        with torch.inference_mode():
            for ranks in dict.fromkeys(_sizes(tp)):
                subject = open_subject(config, ranks, dp_attention, device, dtype, deterministic, op)
                graphs, left = _graphs(mode, subject.device.type), seconds - (time.monotonic() - start)
                settings: dict[str, Any] = grid | {"samples": samples, "noise": noise, "seconds": left}
                done.open()
                for cell in run(subject, out, graphs=graphs, command=["anabranch", *sys.argv[1:]], **settings):
                    done.add(cell)
                    typer.echo(f"tp {ranks} {_line(cell)}  ({time.monotonic() - start:.0f} s)", err=True)
                torch.cuda.empty_cache()  # the next layout's tensors have other sizes
    except GateRedError as error:
        typer.echo(f"gate red, nothing is timed: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(done.line(out, seconds))


class _Done:
    """What came of each layout's cells: the last one seen, and how many the table has."""

    def __init__(self) -> None:
        self._last: list[Progress | None] = []
        self._kept = self._noisy = 0

    def open(self) -> None:
        """Another layout begins."""
        self._last.append(None)

    def add(self, cell: "Progress") -> None:
        self._last[-1] = cell
        self._kept += cell.kept
        self._noisy += not cell.kept

    def line(self, out: Path, seconds: float) -> str:
        """How far it came, and what to do next."""
        noisy = f", {self._noisy} dropped as noise" if self._noisy else ""
        if all(cell is not None and cell.number == cell.total for cell in self._last):
            return f"{out}: {self._kept} cells{noisy}; use it with --fusion table={out}, read it with plan --explain"
        return f"{out}: {self._kept or 'no'} cells{noisy} after {seconds:g} s; run the same command again to go on"


def _kinds(text: str) -> tuple["LayerKind", ...]:
    wanted = text.split(",")
    if set(wanted) - set(_KINDS):
        raise ValueError(f"kinds={text!r}: accepted are {', '.join(_KINDS)}, with commas between them")
    return tuple(kind for kind in _KINDS if kind in wanted)


def _sizes(text: str) -> list[int]:
    """Layouts in the order given: what is worth most comes first."""
    numbers("tp", text)
    return [int(part) for part in text.split(",")]


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
    known = " (was there)" if progress.reused else "" if progress.kept else " (noise, dropped)"
    return f"[{progress.number}/{progress.total}] {where}: {times} us, A/A {progress.spread_us:.1f} us{known}"
