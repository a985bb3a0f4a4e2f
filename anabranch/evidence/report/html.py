"""One HTML page with everything in it: no script, no network, readable on a phone, on paper, in light and in dark."""

from collections.abc import Iterator
from html import escape

from anabranch.evidence.report.axes import STYLE
from anabranch.evidence.report.build import Report
from anabranch.evidence.report.sections import Section, Table

SHORT = 26  # letters
PAGE = """
*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1220px;margin:0 auto;padding:20px 16px 48px}h1{font-size:24px;line-height:1.25;margin:0 0 4px}
h2{font-size:18px;margin:36px 0 8px;padding-top:12px;border-top:1px solid var(--line)}
h3{font-size:14px;margin:16px 0 4px}
p{margin:6px 0;overflow-wrap:anywhere}.when{color:var(--soft)}.headline{font-size:17px;font-weight:600;
background:var(--panel);border-left:4px solid var(--a);padding:10px 14px;margin:14px 0}
.warn{border-left:4px solid var(--b);
padding-left:10px}.scroll{overflow-x:auto;margin:10px 0}table{border-collapse:collapse;font-size:13px}
th,td{padding:4px 12px 4px 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
th{color:var(--soft);font-weight:600}.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.w{min-width:14em;max-width:34em;overflow-wrap:break-word}.k{white-space:nowrap}
.charts{display:flex;flex-wrap:wrap;gap:16px}.chart{max-width:100%;height:auto;flex:0 1 auto}
.wide{max-width:none}.charts>.scroll{width:100%}details>summary{cursor:pointer;font-weight:600}
@media print{main{max-width:none;padding:0}h2{break-after:avoid}tr,.chart{break-inside:avoid}.scroll{overflow:visible}
.wide{max-width:100%;height:auto}details>summary{display:none}table{font-size:11px}}
"""


def to_html(report: Report) -> str:
    """The page as text."""
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(report.title)}</title><style>{STYLE}{PAGE}</style></head>"
    )
    top = (
        f'<h1>{escape(report.title)}</h1><p class="when">{escape(report.created)}</p>'
        f'<p class="headline">{escape(report.headline)}</p>'
    )
    body = "\n".join("\n".join(_section(section)) for section in report.sections)
    return f"{head}\n<body><main>{top}\n{body}\n</main></body></html>\n"


def _section(section: Section) -> Iterator[str]:
    yield f"<section><h2>{escape(section.title)}</h2>"
    if section.fold:
        yield "<details open><summary>Details</summary>"
    for line in section.text:
        kind = ' class="warn"' if line.startswith("Warning:") else ""
        yield f"<p{kind}>{escape(line)}</p>"
    tables = [_table(table) for table in section.tables]
    yield from tables[:1]
    if section.charts:
        pictures = (f'<div class="scroll">{c}</div>' if 'class="chart wide"' in c else c for c in section.charts)
        yield f'<div class="charts">{"".join(pictures)}</div>'
    yield from tables[1:]
    yield "</details></section>" if section.fold else "</section>"


def _table(table: Table) -> str:
    head = "".join(f'<th class="{_kind(table, i, cell)}">{escape(cell)}</th>' for i, cell in enumerate(table.head))
    rows = (
        "<tr>"
        + "".join(f'<td class="{_kind(table, i, cell)}">{escape(cell)}</td>' for i, cell in enumerate(row))
        + "</tr>"
        for row in table.rows
    )
    title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    top = f"<thead><tr>{head}</tr></thead>" if any(table.head) else ""
    return f'{title}<div class="scroll"><table>{top}<tbody>{"".join(rows)}</tbody></table></div>'


def _kind(table: Table, column: int, cell: str) -> str:
    """n: a figure; w: words that may wrap; k: so few that they would only wrap badly."""
    return "n" if column >= table.words else "w" if len(cell) > SHORT else "k"
