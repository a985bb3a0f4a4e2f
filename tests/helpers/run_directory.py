"""A run directory as `bench ab` leaves it: raw requests with known times, and a summary computed from nothing else."""

import random
from pathlib import Path

from anabranch.evidence.record import RequestRow
from anabranch.evidence.rundir import ArmInfo, Comparison, Control, RunDir, RunResult, Summary

ARMS = ("separate", "whole")
SCHEDULE = ("C1", "C2", "A1", "B1", "A2", "B2")


def requests(seed, slower, count=64):
    """Answers of 16 tokens; all times scale with `slower`."""
    rng = random.Random(seed)
    rows = []
    for index in range(count):
        start, ttft = index * 0.05, slower * (0.080 + 0.03 * rng.expovariate(1))
        arrivals = [start + ttft]
        for _ in range(15):
            arrivals.append(arrivals[-1] + slower * (0.009 + 0.002 * rng.random()))
        rows.append(
            RequestRow(
                index=index, start_s=start, first_s=arrivals[0], end_s=arrivals[-1], input_tokens=128, output_tokens=16,
                arrivals=arrivals, counts=[1] * 16, finish_reason="length",
            )
        )  # fmt: skip
    rows[3].error = "status 500"
    return rows


def comparison(**changes):
    given = {
        "metric": "output_throughput", "unit": "tok/s", "better": "higher", "a": 3055.28, "b": 3122.06,
        "ratio": 1.02186, "ci_low": 1.0118, "ci_high": 1.0321, "verdict": "faster", "smallest_effect_pct": 0.9,
        "pooled_ratio": 1.02186, "pairs": [1.0219, 1.0220], "spread_pct": 0.4, "primary": True,
    }  # fmt: skip
    return Comparison(**(given | changes))


def summary(**changes):
    runs = [
        RunResult(
            run=label,
            arm=ARMS[label.startswith("B")],
            phase="control" if label.startswith("C") else "ab",
            file=f"requests/{label.lower()}.jsonl",
            metrics={"output_throughput": 3050 + 7 * i + 70 * label.startswith("B"), "mean_tpot_ms": 95.1, "failed": 1},
        )
        for i, label in enumerate(SCHEDULE)
    ]
    equal = {
        "inputs": 32, "identical_outputs": 32, "tokens": 2048, "identical_tokens": 2048, "logprobs": 2048,
        "identical_logprobs": 2048, "max_logprob_diff": 0.0, "failed": 0, "first_difference": None,
    }  # fmt: skip
    first = {"case": "prompt-7", "unit": "token", "position": 19, "a": 441, "b": 17}
    given = {
        "title": "KDA prologue: whole against separate <one & two>",
        "created": "2026-11-30T00:00:00+00:00",
        "provenance": {
            "commits": {".": {"commit": "25b684c", "dirty": True}},
            "command": "anabranch bench ab spec.toml",
            "versions": {"python": "3.11.2", "torch": "2.13.0"},
            "devices": ["NVIDIA H200, 580.1, 1980 MHz, 3201 MHz, 340 W, 44"],
        },
        "arms": [
            ArmInfo(name=ARMS[0], command="anabranch serve tiny-k3 --fusion kda=separate --port {port}"),
            ArmInfo(name=ARMS[1], command="anabranch serve tiny-k3 --fusion kda=whole --port {port}", env={"X": "1"}),
        ],
        "schedule": list(SCHEDULE),
        "runs": runs,
        "control": Control(metric="output_throughput", spread_pct=0.4, pairs_pct=[0.4]),
        "comparison": [
            comparison(),
            comparison(metric="mean_tpot_ms", unit="ms", better="lower", a=95.16, b=93.123, ratio=0.9786, ci_low=0.969,
                       ci_high=0.9881, primary=False),
            comparison(metric="p99_ttft_ms", unit="ms", better="lower", a=7046.0, b=6937.0, ratio=0.9845,
                       primary=False, ci_low=float("nan"), ci_high=float("nan"), verdict="screening",
                       smallest_effect_pct=float("nan")),
        ],
        "exact": {
            "oracle": True, "verdict": "different", "control": [equal | {"runs": ["A1", "A2"]}],
            "pairs": [equal | {"runs": ["A1", "B1"], "identical_outputs": 31, "first_difference": first}],
        },
        "accuracy": {"arms": {"separate": {"scores": [0.955, 0.953]}, "whole": {"scores": [0.9528, 0.9559]}},
                     "mcnemar": {"only_a": 12, "only_b": 9, "p": 0.66}},
        "warnings": ["whole combines kda, mla: a difference belongs to none of them alone"],
    }  # fmt: skip
    return Summary(**(given | changes))


def write(path: Path, made: Summary | None = None) -> Path:
    """The directory, with raw requests of every run."""
    made = made or summary()
    place = RunDir.start(path, "title = 'made by a test'\n")
    for seed, run in enumerate(made.runs):
        slot = Path(run.file).stem
        slower = 0.98 if run.arm == ARMS[1] else 1.0
        place.write_rows("requests", slot, [row.to_json() for row in requests(seed, slower)])
        place.finish(slot, {"counters": {}})
    place.write_summary(made)
    return path
