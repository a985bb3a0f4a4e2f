"""From a run directory to sections of a report: what is said, in which tables and pictures, whoever prints it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from anabranch.evidence.record import RequestRow
from anabranch.evidence.report import charts
from anabranch.evidence.report.figures import figure, percent, plain_rows, signed
from anabranch.evidence.report.sections import Section, Table
from anabranch.evidence.report.traces import trace_section
from anabranch.evidence.rundir import CONTROL, Comparison, RunDir, Summary
from anabranch.evidence.trace.export import FORMAT as TRACE_FORMAT

FORMAT = "anabranch-report/1"
DISTRIBUTIONS: dict[str, tuple[str, Callable[[RequestRow], list[float]]]] = {
    "ttft": ("time to first token, ms", lambda row: [] if row.ttft_s is None else [row.ttft_s * 1e3]),
    "tpot": ("time per output token, ms", lambda row: [] if row.tpot_s is None else [row.tpot_s * 1e3]),
    "itl": ("inter-token latency, ms", lambda row: [gap * 1e3 for gap in row.itl_s]),
    "e2el": ("end-to-end latency, ms", lambda row: [] if row.e2el_s is None else [row.e2el_s * 1e3]),
}


@dataclass(frozen=True, kw_only=True)
class Report:
    title: str
    created: str
    headline: str
    sections: Sequence[Section]
    document: dict[str, Any] = field(default_factory=dict)


def build(path: Path) -> Report:
    """Everything that a run directory holds; ValueError in one line if it holds no summary or a broken file."""
    place = RunDir.open(path)
    summary = place.read_summary()
    samples = _samples(place, summary)
    traces = read_traces(path / "traces")
    provenance = summary.provenance or place.read_provenance()
    sections = [
        _comparison(summary),
        _distributions(samples),
        _runs(summary),
        *(trace_section(name, document) for name, document in traces.items()),
        _exact(summary.exact),
        _facts("Accuracy", summary.accuracy),
        _arms(summary),
        _facts("Provenance", provenance, fold=True),
    ]
    kept = [section for section in sections if section.text or section.tables or section.charts]
    document = {
        "format": FORMAT,
        "summary": summary.to_json(),
        "distributions_ms": {key: {arm: _quantiles(v) for arm, v in arms.items()} for key, arms in samples.items()},
        "traces": traces,
    }
    return Report(
        title=summary.title, created=summary.created, headline=headline(summary), sections=kept, document=document
    )


def headline(summary: Summary) -> str:
    """The verdict on the primary metric in one sentence."""
    chosen = next((c for c in summary.comparison if c.primary), next(iter(summary.comparison), None))
    if chosen is None:
        return "Nothing was compared."
    names = [arm.name for arm in summary.arms]
    against = f"{names[1]} against {names[0]}" if len(names) > 1 else names[0]
    says = f"{against}, {chosen.metric}: {chosen.verdict}, {percent(chosen.ratio)}"
    if isfinite(chosen.ci_low) and isfinite(chosen.ci_high):
        confidence = f"{chosen.confidence:.0%}".replace("%", " %")
        says += f" ({confidence} interval {percent(chosen.ci_low)} to {percent(chosen.ci_high)})"
    return f"{says}."


def read_traces(folder: Path) -> dict[str, dict[str, Any]]:
    """Documents of `trace slice` and `trace diff` that were put beside a run, by file name."""
    found = {}
    for file in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file}: not valid JSON ({error})") from None
        if not isinstance(document, dict) or document.get("format") != TRACE_FORMAT:
            raise ValueError(f"{file}: no {TRACE_FORMAT} document; write it with: anabranch trace diff A B --json FILE")
        found[file.stem] = document
    return found


def _samples(place: RunDir, summary: Summary) -> dict[str, dict[str, list[float]]]:
    """Metric -> arm -> values in ms, pooled over the measured runs; failed requests and the A/A phase are left out."""
    pooled: dict[str, dict[str, list[float]]] = {}
    for run in summary.runs:
        if run.phase == CONTROL or not run.file:
            continue
        for row in place.read_requests(Path(run.file).stem):
            if row.ok:
                for key, (_, take) in DISTRIBUTIONS.items():
                    pooled.setdefault(key, {}).setdefault(run.arm, []).extend(take(row))
    return {key: arms for key, arms in pooled.items() if arms and all(arms.values())}


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ranked = sorted(values)
    at = {f"p{share}": ranked[round((len(ranked) - 1) * share / 100)] for share in (0, 10, 25, 50, 75, 90, 95, 99, 100)}
    return {"count": len(ranked), **at}


def _comparison(summary: Summary) -> Section:
    text = [f"Warning: {warning}" for warning in summary.warnings]
    control = summary.control
    if control is not None:
        text.append(f"A against A differs by up to {figure(control.spread_pct, 2)} % in {control.metric}.")
    if any(row.pooled for row in summary.comparison):
        text.append("Figures of an arm are pooled over all its requests; ratios come from adjacent pairs of runs.")
    names = [arm.name for arm in summary.arms]
    head = ["metric", "unit", "verdict", *names[:2], "change", "interval", "smallest effect seen"]
    tables = [Table(head=head, rows=[_row(row) for row in summary.comparison], words=3)] if summary.comparison else []
    drawn = [
        (row.metric, (row.ratio - 1) * 100, (row.ci_low - 1) * 100, (row.ci_high - 1) * 100)
        for row in summary.comparison
        if all(map(isfinite, (row.ratio, row.ci_low, row.ci_high)))
    ]
    spread = control.spread_pct if control is not None and isfinite(control.spread_pct) else None
    return Section(title="Verdict", text=text, tables=tables, charts=[charts.intervals(drawn, spread)] if drawn else [])


def _row(row: Comparison) -> list[str]:
    return [
        row.metric,
        row.unit,
        row.verdict,
        figure(row.a),
        figure(row.b),
        percent(row.ratio),
        f"{percent(row.ci_low)} to {percent(row.ci_high)}" if isfinite(row.ci_low) else "-",
        f"{figure(row.smallest_effect_pct, 2)} %" if isfinite(row.smallest_effect_pct) else "-",
    ]


def _distributions(samples: Mapping[str, Mapping[str, Sequence[float]]]) -> Section:
    head = ["metric", "arm", "samples", "p50", "p90", "p99", "largest"]
    rows, drawn = [], []
    for key, arms in samples.items():
        axis = DISTRIBUTIONS[key][0]
        drawn.append(charts.distribution(arms, axis))
        for arm, values in arms.items():
            at = _quantiles(values)
            rows.append([axis, arm, f"{at['count']:,}", *(figure(at[p]) for p in ("p50", "p90", "p99", "p100"))])
    tables = [Table(head=head, rows=rows, words=2)] if rows else []
    return Section(title="Distributions over all requests", tables=tables, charts=drawn)


def _runs(summary: Summary) -> Section:
    compared = [row for row in summary.comparison if any(row.metric in run.metrics for run in summary.runs)]
    named = [f"{row.metric}, {row.unit}" if row.unit else row.metric for row in compared]
    head = ["run", "arm", "phase", "faults", *named]
    rows = []
    for run in summary.runs:
        phase = "A/A" if run.phase == CONTROL else "A/B"
        figures = (figure(run.metrics.get(row.metric)) for row in compared)
        rows.append([run.run, run.arm, phase, "; ".join(run.faults) or "none", *figures])
    main = next((row for row in compared if row.primary), next(iter(compared), None))
    drawn = []
    if main is not None:
        points = [(r.run, r.arm, r.metrics.get(main.metric)) for r in summary.runs]
        known = [(run, arm, float(value)) for run, arm, value in points if isinstance(value, int | float)]
        drawn = [charts.runs(known, f"{main.metric}, {main.unit}" if main.unit else main.metric)] if known else []
    text = [f"Schedule: {' '.join(summary.schedule)}."] if summary.schedule else []
    return Section(title="Runs", text=text, tables=[Table(head=head, rows=rows, words=4)] if rows else [], charts=drawn)


_EXACT = ("inputs", "identical_outputs", "tokens", "identical_tokens", "logprobs", "identical_logprobs", "failed")


def _exact(found: Mapping[str, Any]) -> Section:
    """A against A first: where that diverges, equality of A and B means nothing."""
    pairs = (("A/A", "control"), ("A/B", "pairs"))
    compared = [(pair, each) for pair, key in pairs for each in found.get(key, [])]
    named = [key.replace("_", " ") for key in _EXACT]
    head = ["runs", "pair", "first difference", *named, "largest logprob difference"]
    rows = []
    for pair, each in compared:
        first = each.get("first_difference")
        where = "none" if first is None else ", ".join(f"{key} {value}" for key, value in first.items())
        figures = (figure(each.get(key)) for key in _EXACT)
        rows.append([" ".join(each.get("runs", [])), pair, where, *figures, figure(each.get("max_logprob_diff"))])
    rest = _facts("Exact outputs", {key: value for key, value in found.items() if key not in ("control", "pairs")})
    tables = [Table(head=head, rows=rows, words=3)] if rows else []
    return Section(title=rest.title, tables=[*rest.tables, *tables])


def _arms(summary: Summary) -> Section:
    rows = [
        [arm.name, arm.command or arm.url or "", " ".join(f"{k}={v}" for k, v in arm.env.items()) or "none"]
        for arm in summary.arms
    ]
    return Section(title="Arms", tables=[Table(head=["arm", "command or URL", "environment"], rows=rows, words=3)])


def _facts(title: str, facts: Mapping[str, Any], fold: bool = False) -> Section:
    """Any nested document as rows of "path, value"; nothing of it is left out."""
    rows = plain_rows(facts)
    tables = [Table(head=["", ""], rows=[[key, signed(value)] for key, value in rows], words=2)] if rows else []
    return Section(title=title, tables=tables, fold=fold)
