"""From a run directory's raw files to its summary; nothing is measured here, so it can be done again at any time."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from anabranch.evidence import exact
from anabranch.evidence.metrics import measure, metric_named, parse_goodput, problems
from anabranch.evidence.provenance import now
from anabranch.evidence.record import RequestRow
from anabranch.evidence.rundir import (
    CONTROL,
    SUMMARY,
    ArmInfo,
    Comparison,
    Control,
    RunDir,
    RunName,
    RunResult,
    Summary,
)
from anabranch.evidence.schedule import ask_exact, number, plan_runs
from anabranch.evidence.scrape import exposes, faults
from anabranch.evidence.spec import ArmSpec, Spec
from anabranch.evidence.stats import Verdict, judge

# a client that is later than this share of a median latency measures itself
_LAG_SHARE = 0.05


def summarise(spec: Spec, run_dir: RunDir) -> Summary:
    """Everything that the finished runs show; runs that are missing are said in `warnings`."""
    planned = plan_runs(spec)
    runs = [run for run in planned if run_dir.finished(run.slot)]
    raw = {run.label: run_dir.read_requests(run.slot) for run in runs}
    results = [_result(spec, run_dir, run, raw[run.label]) for run in runs]
    comparison = _compare(spec, runs, raw, {r.run: r.metrics for r in results}, void=any(r.faults for r in results))
    primary = next((c for c in comparison if c.primary), None)
    control = None
    if primary is not None:
        pairs = [
            100 * (b / a - 1) for a, b in _control_pairs(runs, {r.run: r.metrics for r in results}, primary.metric)
        ]
        control = Control(metric=primary.metric, spread_pct=primary.spread_pct, pairs_pct=pairs)
    return Summary(
        title=spec.title,
        created=now(),
        provenance=run_dir.read_provenance(),
        arms=[_arm_info(arm) for arm in spec.arms],
        schedule=[run.label for run in planned],
        runs=results,
        control=control,
        comparison=comparison,
        exact=_exact(spec, run_dir, runs),
        accuracy=run_dir.read_summary().accuracy if (run_dir.path / SUMMARY).exists() else {},
        warnings=_warnings(spec, planned, results, raw, run_dir),
    )


def _arm_info(arm: ArmSpec) -> ArmInfo:
    return ArmInfo(name=arm.name, command=arm.command, url=arm.url, env=dict(arm.env))


def _result(spec: Spec, run_dir: RunDir, run: RunName, rows: Sequence[RequestRow]) -> RunResult:
    kept = run_dir.read_counters(run.slot)
    metrics = measure([rows], spec.compare.percentiles, parse_goodput(spec.compare.goodput))
    arm = spec.a if run.arm == spec.a.name else spec.b
    wrong = faults(kept["counters"], arm.expect, spec.compare.allow_cached)
    if metrics["failed"]:
        wrong.append(f"{metrics['failed']} of {len(rows)} requests failed")
    if metrics["cached_tokens"] and not spec.compare.allow_cached:
        wrong.append(f"{metrics['cached_tokens']} prompt tokens came from a cache")
    return RunResult(
        run=run.label,
        arm=run.arm,
        phase=run.phase,
        file=f"requests/{run.slot}.jsonl",
        metrics=metrics,
        counters={name: value for name, value in kept["counters"].items() if value},
        faults=wrong,
    )


def _compare(
    spec: Spec, runs: Sequence[RunName], raw: dict[str, list[RequestRow]], figures: dict[str, Any], void: bool
) -> list[Comparison]:
    labels = _ab_pairs(runs)
    if not labels:
        return []
    pooled = [
        measure([raw[pair[i]] for pair in labels], spec.compare.percentiles, parse_goodput(spec.compare.goodput))
        for i in (0, 1)
    ]
    found, names = [], spec.compare.metrics
    for name in names:
        pairs = [(figures[a].get(name), figures[b].get(name)) for a, b in labels]
        own = _control_pairs(runs, figures, name)
        if all(a and b for a, b in [*pairs, *own]):
            judged = judge(pairs, own, metric_named(name).better, spec.compare.confidence, len(names))
            verdict = "void" if void else judged.verdict
            found.append(_comparison(spec, name, judged, pooled[0][name], pooled[1][name], verdict))
    return found


def _comparison(spec: Spec, name: str, judged: Verdict, a: float, b: float, verdict: str) -> Comparison:
    return Comparison(
        metric=name,
        unit=metric_named(name).unit,
        better=metric_named(name).better,
        a=a,
        b=b,
        ratio=judged.ratio,
        ci_low=judged.low,
        ci_high=judged.high,
        verdict=verdict,
        smallest_effect_pct=judged.smallest_effect_pct,
        pooled_ratio=b / a,
        pairs=judged.pairs,
        spread_pct=judged.spread_pct,
        confidence=spec.compare.confidence,
        primary=name == spec.compare.metrics[0],
    )


def _ab_pairs(runs: Sequence[RunName]) -> list[tuple[str, str]]:
    done = {run.label for run in runs}
    numbers = sorted(number(run) for run in runs if run.label.startswith("A"))
    return [(f"A{i}", f"B{i}") for i in numbers if f"B{i}" in done]


def _control_pairs(runs: Sequence[RunName], figures: dict[str, Any], name: str) -> list[tuple[float, float]]:
    done = [run for run in runs if run.phase == CONTROL]
    by_pair: dict[int, list[float]] = {}
    for run in done:
        by_pair.setdefault(number(run), []).append(figures[run.label].get(name))
    return [(pair[0], pair[1]) for pair in by_pair.values() if len(pair) == 2]


def _exact(spec: Spec, run_dir: RunDir, runs: Sequence[RunName]) -> dict[str, Any]:
    asked = {run.label: run_dir.read_rows("exact", run.slot) for run in runs if ask_exact(spec, run)}
    arm_a = [label for label in asked if label.startswith("A")]
    if not arm_a:
        return {}
    control = [exact.compare(asked[a], asked[b]) | {"runs": [a, b]} for a, b in pairwise(arm_a)]
    pairs = [exact.compare(asked[a], asked[b]) | {"runs": [a, b]} for a, b in _ab_pairs(runs) if a in asked]
    return exact.verdict(control, pairs)


def _warnings(
    spec: Spec,
    planned: Sequence[RunName],
    results: Sequence[RunResult],
    raw: dict[str, list[RequestRow]],
    run_dir: RunDir,
) -> list[str]:
    lines = []
    if missing := len(planned) - len(results):
        lines.append(f"partial: {missing} of {len(planned)} runs are missing")
    if spec.schedule.pairs == 1:
        lines.append("screening: a single pair shows no difference, however large")
    if not spec.schedule.control:
        lines.append("no A/A control was run: the scatter is that of the A/B pairs alone")
    if len(spec.b.changes) > 1:
        lines.append(f"{spec.b.name} combines {', '.join(spec.b.changes)}: a difference belongs to none of them alone")
    kept = {run.label: run_dir.read_counters(run.slot) for run in planned if run_dir.finished(run.slot)}
    for result in results:
        told = [*result.faults, *problems(raw[result.run]), *kept[result.run].get("notes", [])]
        lines += [f"{result.run}: {line}" for line in told]
    return lines + _never_exposed(spec, kept) + _late_client(results, kept)


def _never_exposed(spec: Spec, kept: dict[str, Any]) -> list[str]:
    """An expectation of zero holds for a counter that does not exist, also for one that is misspelt."""
    names = {name for arm in spec.arms for name in arm.expect}
    unseen = [name for name in sorted(names) if kept and not any(exposes(k["counters"], name) for k in kept.values())]
    return [f"no run exposes a counter {name!r}, which an arm expects to know" for name in unseen]


def _late_client(results: Sequence[RunResult], kept: dict[str, Any]) -> list[str]:
    late = {}
    for result in results:
        lag, latency = 1e3 * kept[result.run].get("client_lag_s", 0.0), result.metrics.get("median_itl_ms")
        if latency and lag > max(1.0, _LAG_SHARE * latency):
            late[result.run] = lag
    if not late:
        return []
    worst = max(late.values())
    return [f"the client's own clock was up to {worst:.1f} ms late (p99) in {', '.join(late)}: latencies include it"]
