"""`anabranch report`: write the report of a run directory again, without measuring anything again."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    directory: Annotated[Path, typer.Argument(help="Run directory, as `bench ab` writes it.")],
    out: Annotated[Path | None, typer.Option(help="Folder for report.html, report.md and report.json.")] = None,
) -> None:
    """Report a measured run as an HTML page, as Markdown and as JSON."""
    from anabranch.evidence.report.write import write_report

    for path in write_report(directory, out):
        typer.echo(f"wrote {path}")
