"""Figures of a load from its raw rows, under the names of `vllm bench serve`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anabranch.evidence.record import RequestRow

LATENCIES = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True)
class Metric:
    """A figure that arms are compared by: its unit, and which way is better."""

    unit: str
    better: str


METRICS = {
    "request_throughput": Metric("req/s", "higher"),
    "input_throughput": Metric("tok/s", "higher"),
    "output_throughput": Metric("tok/s", "higher"),
    "total_token_throughput": Metric("tok/s", "higher"),
    "request_goodput": Metric("req/s", "higher"),
    **{
        f"{statistic}_{name}_ms": Metric("ms", "lower")
        for statistic in ("mean", "median", "p90", "p95", "p99")
        for name in LATENCIES
    },
}


def metric_named(name: str) -> Metric:
    """A metric that arms can be compared by.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in METRICS:
        raise ValueError(f"metric {name!r}: accepted are {', '.join(METRICS)}")
    return METRICS[name]


def parse_goodput(items: Iterable[str]) -> dict[str, float]:
    """From items like "ttft:500" (milliseconds): the most that a good request may take.

    Raises:
        ValueError: an item has another form.
    """
    limits = {}
    for item in items:
        name, _, text = item.partition(":")
        try:
            limits[name] = float(text)
        except ValueError:
            limits[name] = -1.0
        if name not in ("ttft", "tpot", "e2el") or not limits[name] > 0:
            raise ValueError(f"goodput {item!r}: need ttft:MS, tpot:MS or e2el:MS")
    return limits


def span_s(rows: Sequence[RequestRow]) -> float:
    """From the first request sent to the last byte received."""
    ends = [row.end_s for row in rows if row.end_s is not None]
    return max(ends) - min(row.start_s for row in rows) if ends else 0.0


def measure(
    runs: Sequence[Sequence[RequestRow]],
    percentiles: Sequence[float] = (99,),
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Figures over all requests of one or more runs.

    Rates are totals over the sum of the runs' durations, and percentiles are over all requests: nothing is averaged
    between runs. Failed requests count in `failed` and in the duration alone.
    """
    rows = [row for run in runs for row in run]
    good = [row for row in rows if row.ok]
    duration = sum(span_s(run) for run in runs if run)
    tokens_in, tokens_out = sum(row.input_tokens for row in good), sum(row.output_tokens for row in good)
    cached = [row.cached_tokens for row in good if row.cached_tokens is not None]
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(rows) - len(good),
        "retries": sum(row.retries for row in rows),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "cached_tokens": sum(cached) if cached else None,
        "request_throughput": _rate(len(good), duration),
        "input_throughput": _rate(tokens_in, duration),
        "output_throughput": _rate(tokens_out, duration),
        "total_token_throughput": _rate(tokens_in + tokens_out, duration),
        "max_output_tokens_per_s": max((_peak_rate(run) for run in runs), default=0.0),
        "max_concurrent_requests": max((_peak_open(run) for run in runs), default=0),
        "distinct_token_ratio": _distinct(good),
    }
    if goodput:
        figures["request_goodput"] = _rate(sum(_meets(row, goodput) for row in good), duration)
    for name in LATENCIES:
        figures |= _spread(name, latencies(name, good), percentiles)
    return figures


def latencies(name: str, rows: Iterable[RequestRow]) -> list[float]:
    """Milliseconds of one latency, one entry a request (`itl`: one a token); requests without it are left out."""
    if name == "itl":
        return [gap * 1e3 for row in rows for gap in row.itl_s]
    return [value * 1e3 for row in rows if (value := getattr(row, f"{name}_s")) is not None]


def problems(rows: Sequence[RequestRow]) -> list[str]:
    """What a reader must know about the rows, in lines."""
    failed = [row for row in rows if not row.ok]
    lines = [f"{len(failed)} of {len(rows)} requests failed, the first: {failed[0].error}"] if failed else []
    if any(row.ok and row.output_tokens > 1 and not row.arrivals for row in rows):
        lines.append("the server names neither token ids nor a running count: ITL is not reported")
    if retried := sum(row.retries for row in rows):
        lines.append(f"{retried} attempts were refused and made again")
    return lines


def _spread(name: str, values: list[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    statistics = {"mean": np.mean, "median": np.median, "std": np.std}
    found = {f"{statistic}_{name}_ms": float(of(values)) if values else None for statistic, of in statistics.items()}
    for p in percentiles:
        found[f"p{p:g}_{name}_ms"] = float(np.percentile(values, p)) if values else None
    return found


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _meets(row: RequestRow, limits: Mapping[str, float]) -> bool:
    """A latency that a request does not have (TPOT of one token) meets every limit."""
    return all((getattr(row, f"{name}_s") or 0.0) * 1e3 <= limit for name, limit in limits.items())


def _peak_rate(rows: Sequence[RequestRow]) -> float:
    """Most tokens in any whole second since the load began."""
    seconds: dict[int, int] = {}
    for row in rows:
        for time, count in zip(row.arrivals, row.counts, strict=True):
            seconds[int(time)] = seconds.get(int(time), 0) + count
    return float(max(seconds.values(), default=0))


def _peak_open(rows: Sequence[RequestRow]) -> int:
    moves = [(row.start_s, 1) for row in rows] + [(row.end_s, -1) for row in rows if row.end_s is not None]
    most = now = 0
    for _, move in sorted(moves):
        now += move
        most = max(most, now)
    return most


def _distinct(rows: Sequence[RequestRow]) -> float | None:
    """Mean share of distinct ids in an answer: near 0, the model repeats itself and the load is not a real one."""
    shares = [len(set(row.token_ids)) / len(row.token_ids) for row in rows if row.token_ids]
    return float(np.mean(shares)) if shares else None
