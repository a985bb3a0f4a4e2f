"""The same report as Markdown for a pull request: tables, no pictures, detail folded."""

import re
from collections.abc import Iterator, Sequence

from anabranch.evidence.report.build import Report
from anabranch.evidence.report.sections import Section, Table

ROWS_SHOWN = 60


def to_markdown(report: Report) -> str:
    """The text, ending in a newline."""
    lines = [f"# {_plain(report.title)}", "", f"**{_plain(report.headline)}**", "", _plain(report.created), ""]
    for section in report.sections:
        lines += _section(section)
    return "\n".join(lines).rstrip() + "\n"


def _section(section: Section) -> Iterator[str]:
    if section.fold:
        yield from (f"<details><summary>{_plain(section.title)}</summary>", "")
    else:
        yield from (f"## {_plain(section.title)}", "")
    for line in section.text:
        yield from (_plain(line), "")
    for table in section.tables:
        yield from _table(table)
    if section.fold:
        yield from ("</details>", "")


def _table(table: Table) -> Iterator[str]:
    if table.title:
        yield from (f"**{_plain(table.title)}**", "")
    yield _line([_plain(cell) for cell in table.head])
    yield _line(["---" if index < table.words else "--:" for index in range(len(table.head))])
    for row in table.rows[:ROWS_SHOWN]:
        yield _line([_plain(cell) for cell in row])
    if len(table.rows) > ROWS_SHOWN:
        yield _line([f"{len(table.rows) - ROWS_SHOWN} more rows in the HTML page", *[""] * (len(table.head) - 1)])
    yield ""


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _plain(text: str) -> str:
    """Characters that Markdown or HTML would take for markup lose that meaning; a cell stays on one line."""
    text = re.sub(r"([\\`*\[\]<>|]|(?<!\w)_|_(?!\w))", r"\\\1", text)
    return " ".join(text.split())
