"""The part of a report that shows slices of traces: figures, kernels, timeline."""

from collections.abc import Mapping
from typing import Any

from anabranch.evidence.report.figures import us
from anabranch.evidence.report.sections import Section, Table
from anabranch.evidence.report.timeline import timeline
from anabranch.evidence.trace.events import short

KERNELS_SHOWN = 40


def trace_section(name: str, document: Mapping[str, Any]) -> Section:
    """`document`: what `anabranch.evidence.trace.export.document` makes."""
    arms = document["arms"]
    text = ["Times under a profiler explain a difference; they are no result of their own."]
    for arm in arms:
        where = " ".join(part for part in (arm["device"], arm["device_name"]) if part)
        until = f" until {arm['until']}" if arm["until"] else ""
        slices = f"{arm['slices']} slices of {arm['steps']} steps ({arm['steps_are']}), from {arm['marker']}{until}"
        text.append(f"{arm['label']}: {arm['source']}, {where}; {slices}.")
        text += [f"{arm['label']}: {note}" for note in arm["notes"]]
    return Section(
        title=f"Trace: {name}",
        text=text,
        tables=[_measures(document), _kernels(document)],
        charts=[timeline(arms)],
    )


def _measures(document: Mapping[str, Any]) -> Table:
    labels = [arm["label"] for arm in document["arms"]]
    head = ["figure", "unit", *(f"{label}: median (low to high)" for label in labels)]
    rows = [
        [measure["name"], measure["unit"], *(spread_text(spread, measure["unit"]) for spread in measure["arms"])]
        + ([_change(measure["change_pct"])] if len(labels) > 1 else [])
        for measure in document["measures"]
    ]
    return Table(head=[*head, "change"] if len(labels) > 1 else head, rows=rows, words=2)


def spread_text(spread: Mapping[str, Any], unit: str) -> str:
    """Median, and the extremes where they differ from it; times come in ns and are shown in us."""
    middle, low, high = (spread[key] for key in ("median", "low", "high"))
    write = us if unit == "us" else (lambda value: f"{value:,g}")
    return write(middle) if low == high else f"{write(middle)} ({write(low)} to {write(high)})"


def _change(pct: float | None) -> str:
    return "-" if pct is None else f"{pct:+.2f} %"


def _kernels(document: Mapping[str, Any]) -> Table:
    labels, kernels = [arm["label"] for arm in document["arms"]], document["kernels"]
    head = ["kernel", *(f"{label}: {what}" for label in labels for what in ("count", "us a slice", "us a launch"))]
    rows = []
    for row in kernels[:KERNELS_SHOWN]:
        sides = zip(row["count"], row["total"], row["one"], strict=True)
        cells = [c for count, total, one in sides for c in (str(count), *(us(s and s["median"]) for s in (total, one)))]
        rows.append([short(row["name"]), *cells] + ([f"{row['change'] / 1e3:+,.3f}"] if len(labels) > 1 else []))
    left = len(kernels) - KERNELS_SHOWN
    title = "Kernels of a slice, medians" + (f"; {left} more in the JSON" if left > 0 else "")
    return Table(title=title, head=[*head, "delta, us"] if len(labels) > 1 else head, rows=rows)
