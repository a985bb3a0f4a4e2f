"""Put a report into files."""

import json
from pathlib import Path

from anabranch.evidence.report.build import build
from anabranch.evidence.report.html import to_html
from anabranch.evidence.report.markdown import to_markdown


def write_report(directory: Path, out: Path | None = None) -> list[Path]:
    """report.html, report.md and report.json of a run, in `out` or in its directory; ValueError as in `build`."""
    report = build(directory)
    place = out or directory
    place.mkdir(parents=True, exist_ok=True)
    texts = {
        "report.html": to_html(report),
        "report.md": to_markdown(report),
        "report.json": json.dumps(report.document, indent=1) + "\n",
    }
    for name, text in texts.items():
        (place / name).write_text(text, encoding="utf-8")
    return [place / name for name in texts]
