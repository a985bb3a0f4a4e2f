"""`anabranch trace`: cut the same piece out of recorded steps, compare two recordings, count launches."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from anabranch.evidence.trace.slice import Cut, SliceSpec

app = typer.Typer(
    help="Read Nsight Systems SQLite exports and torch.profiler Chrome traces of any program.", no_args_is_help=True
)

File = Annotated[Path, typer.Argument(help="Nsight Systems .sqlite export, or torch.profiler .json or .json.gz.")]
Marker = Annotated[str | None, typer.Option(help="Pattern of the launch that opens a slice; default: found by itself.")]
Range = Annotated[
    str | None,
    typer.Option("--range", help="I:J, markers of a step between which to cut; default: from each to the next."),
]
Until = Annotated[str | None, typer.Option(help="Pattern of the launch that closes a slice, instead of a marker.")]
After = Annotated[bool, typer.Option("--after", help="Open where the marker ends, not where it starts.")]
Step = Annotated[
    str | None, typer.Option(help="Pattern of NVTX ranges that are steps; default: graph replays, or all.")
]
Device = Annotated[int | None, typer.Option(help="Device number; default: the first that did anything.")]
Process = Annotated[int | None, typer.Option(help="Process, where several use one device number.")]
On = Annotated[str, typer.Option(help="gpu, cpu (outermost host operations), or auto: the GPU where it did anything.")]
Json = Annotated[
    Path | None, typer.Option("--json", help="Everything, in ns; in a run's folder traces/ for its report.")
]
Csv = Annotated[Path | None, typer.Option("--csv", help="The table of kernels, in us.")]
Perfetto = Annotated[Path | None, typer.Option(help="The representative slices for ui.perfetto.dev, aligned at 0.")]
Svg = Annotated[Path | None, typer.Option(help="The representative slices as a timeline.")]
Top = Annotated[int, typer.Option(min=1, help="Kernels to print.")]


@app.callback()
def _verbs() -> None:
    """Read Nsight Systems SQLite exports and torch.profiler Chrome traces of any program."""


@app.command("slice")
def slice_(
    file: File,
    marker: Marker = None,
    range_: Range = None,
    until: Until = None,
    after: After = False,
    step: Step = None,
    device: Device = None,
    process: Process = None,
    on: On = "auto",
    json_: Json = None,
    csv: Csv = None,
    perfetto: Perfetto = None,
    svg: Svg = None,
    top: Top = 20,
) -> None:
    """Cut matching slices out of every step of one recording."""
    cuts = _cuts([file], spec(marker, range_, until, after), step, device, process, on)
    _show(cuts, [file.stem], top)
    _write(cuts, [file.stem], json_=json_, csv=csv, perfetto=perfetto, svg=svg)


@app.command()
def diff(
    a: File,
    b: File,
    marker: Marker = None,
    range_: Range = None,
    until: Until = None,
    after: After = False,
    step: Step = None,
    device: Device = None,
    process: Process = None,
    on: On = "auto",
    label: Annotated[str, typer.Option(help="What to call the two.")] = "A,B",
    json_: Json = None,
    csv: Csv = None,
    perfetto: Perfetto = None,
    svg: Svg = None,
    top: Top = 20,
) -> None:
    """The same slices of two recordings, and what changed from the first to the second."""
    labels = [name.strip() for name in label.split(",")]
    if len(set(labels)) != 2 or not all(labels):
        raise ValueError(f"label={label!r}: need two names with a comma between them")
    cuts = _cuts([a, b], spec(marker, range_, until, after), step, device, process, on)
    _show(cuts, labels, top)
    _write(cuts, labels, json_=json_, csv=csv, perfetto=perfetto, svg=svg)


@app.command()
def count(
    files: Annotated[list[Path], typer.Argument(help="Recordings, such as one a rank; their launches add up.")],
    expect: Annotated[list[str], typer.Option(help='"PATTERN=N", or "PATTERN" to ask. Repeatable.')],
    kind: Annotated[list[str] | None, typer.Option(help="Only kernel, memcpy, memset or cpu_op. Repeatable.")] = None,
    device: Device = None,
    process: Process = None,
    on: On = "auto",
) -> None:
    """Count launches by name pattern on all devices; status 1 if one is not exactly as expected."""
    from anabranch.evidence.trace.count import count as count_launches
    from anabranch.evidence.trace.load import load_trace

    known = ("kernel", "memcpy", "memset", "cpu_op")
    if wrong := [name for name in kind or [] if name not in known]:
        raise ValueError(f"kind={wrong[0]!r}: accepted are {', '.join(known)}")
    traces = [load_trace(file, on) for file in files]
    if device is not None or process is not None:
        traces = [trace.on(device, process) for trace in traces]
    results = count_launches(traces, expect, kind or ())
    for result in results:
        if result.ok:
            typer.echo(result.line())
        else:
            typer.echo(f"wrong count: {result.line()}", err=True)
    if not all(result.ok for result in results):
        raise typer.Exit(1)


def spec(marker: str | None, range_: str | None, until: str | None, after: bool) -> "SliceSpec":
    """From the options; ValueError if the range is not I:J."""
    from anabranch.evidence.trace.slice import SliceSpec

    first = last = None
    if range_ is not None:
        ends = range_.split(":")
        if len(ends) != 2 or not all(end.strip().isdecimal() for end in ends):
            raise ValueError(f"range={range_!r}: need I:J with numbers from 0, such as 0:4")
        first, last = int(ends[0]), int(ends[1])
    return SliceSpec(marker=marker, first=first, last=last, until=until, after=after)


def _cuts(
    files: list[Path], where: "SliceSpec", step: str | None, device: int | None, process: int | None, on: str
) -> "list[Cut]":
    from anabranch.evidence.trace.load import load_trace
    from anabranch.evidence.trace.slice import cut

    return cut([load_trace(file, on).on(device, process) for file in files], where, step)


def _show(cuts: "list[Cut]", labels: list[str], top: int) -> None:
    from anabranch.evidence.report.figures import us
    from anabranch.evidence.trace.events import short
    from anabranch.evidence.trace.table import kernel_rows, measures

    for cut, label in zip(cuts, labels, strict=True):
        where = f"{cut.place} {cut.device}".strip()
        typer.echo(f"{label}: {cut.source}, {where}; {len(cut.steps)} steps: {cut.how}")
        found = " (found by itself)" if cut.found else ""
        typer.echo(
            f"  {len(cut.slices)} slices from {short(cut.marker)}{found}" + (f" until {cut.until}" if cut.until else "")
        )
        for note in cut.notes:
            typer.echo(f"  note: {note}")
    both = len(cuts) > 1
    rows = []
    for measure in measures(cuts):
        cells = [_spread(arm, measure.unit) for arm in measure.arms]
        pct = measure.change_pct
        rows.append([measure.name, measure.unit, *cells, *(["-" if pct is None else f"{pct:+.2f} %"] if both else [])])
    _print(["median (low to high)", "", *labels, *(["change"] if both else [])], rows)
    kernels = kernel_rows(cuts)
    rows = [
        [
            short(row.name, 48),
            *(str(n) for n in row.count),
            *(us(t.median if t else None) for t in row.total),
            *([f"{row.change / 1e3:+,.3f}"] if both else []),
        ]
        for row in kernels[:top]
    ]
    head = [f"kernels of a slice ({len(kernels)})", *(f"{label} count" for label in labels)]
    _print([*head, *(f"{label} us" for label in labels), *(["delta us"] if both else [])], rows)


def _spread(spread: Any, unit: str) -> str:
    from dataclasses import asdict

    from anabranch.evidence.report.traces import spread_text

    return spread_text(asdict(spread), unit)


def _print(head: list[str], rows: list[list[str]]) -> None:
    """Aligned columns, never cut: the first to the left, figures to the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    typer.echo()
    for row in [head, *rows]:
        cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        typer.echo("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())


def _write(
    cuts: "list[Cut]",
    labels: list[str],
    *,
    json_: Path | None,
    csv: Path | None,
    perfetto: Path | None,
    svg: Path | None,
) -> None:
    from anabranch.evidence.report.axes import standalone
    from anabranch.evidence.report.timeline import timeline
    from anabranch.evidence.trace import export

    makers = {
        json_: lambda: json.dumps(export.document(cuts, labels)),
        csv: lambda: export.to_csv(cuts, labels),
        perfetto: lambda: json.dumps(export.perfetto(cuts, labels)),
        svg: lambda: standalone(timeline(export.document(cuts, labels)["arms"])),
    }
    for path, make in makers.items():
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(make(), encoding="utf-8")
            typer.echo(f"wrote {path}")
