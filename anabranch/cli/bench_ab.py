"""`anabranch bench ab`: is arm B faster than arm A, and would this run have seen it?"""

import asyncio
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from anabranch.evidence.rundir import Comparison, Summary


def ab(
    spec: Annotated[Path, typer.Argument(help="TOML file: arms, load, schedule (docs/benchmarking.md).")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run directory; an unfinished one goes on.")] = None,
) -> None:
    """A against itself, then A B A B ...: pooled figures, paired ratios, a verdict, and a run directory.

    Ctrl-C ends the servers and leaves what was measured; the same command goes on from there. Status 1: a run is void.
    """
    from anabranch.cli.watch import Watch
    from anabranch.evidence.ab import run_ab
    from anabranch.evidence.report.write import write_report
    from anabranch.evidence.rundir import RunDir
    from anabranch.evidence.spec import parse_spec

    text = read_text(spec)
    wanted = parse_spec(text, str(spec), spec.parent)
    run_dir = RunDir.start(out or Path("runs") / f"{spec.stem}-{time.strftime('%Y%m%d-%H%M%S')}", text)
    typer.echo(f"run directory {run_dir.path}", err=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the servers, too
    with Watch() as watch:
        summary = asyncio.run(run_ab(wanted, run_dir, watch))
    typer.echo("\n".join(lines(summary)))
    for path in write_report(run_dir.path):
        typer.echo(f"wrote {path}")
    if any(run.faults for run in summary.runs):
        raise typer.Exit(1)


def read_text(path: Path) -> str:
    """A file of the user's; ValueError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def lines(summary: "Summary") -> list[str]:
    """The outcome for people."""
    a, b = (arm.name for arm in summary.arms)
    found = [f"{summary.title}: B = {b} against A = {a}, schedule {' '.join(summary.schedule)}"]
    found += [_line(each) for each in summary.comparison]
    if summary.exact:
        found.append(f"fixed inputs: {summary.exact['verdict']}")
        for pair in summary.exact["pairs"]:
            tokens = f"{pair['identical_tokens']} of {pair['tokens']} token ids identical"
            found.append(f"  {' against '.join(pair['runs'])}: {tokens}, logprobs differ by {_most(pair)} at most")
            if pair["first_difference"]:
                found.append(f"  first difference: {pair['first_difference']}")
    return found + [f"warning: {line}" for line in summary.warnings]


def _line(each: "Comparison") -> str:
    interval = f"{each.ci_low:.4f} to {each.ci_high:.4f}" if each.ci_low == each.ci_low else "none"
    return (
        f"  {each.metric:20} A {each.a:10.2f} B {each.b:10.2f} {each.unit:5} B/A {each.ratio:.4f} ({interval}), "
        f"A/A {each.spread_pct:.1f} %, smallest effect {each.smallest_effect_pct:.1f} %: {each.verdict}"
    )


def _most(pair: dict) -> str:
    return "nothing known" if pair["max_logprob_diff"] is None else f"{pair['max_logprob_diff']:g}"
