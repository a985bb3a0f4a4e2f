"""What a run directory keeps, and what it refuses."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.evidence.record import RequestRow
from anabranch.evidence.rundir import ArmInfo, Comparison, Control, RunDir, RunResult, Summary

TIMES = st.floats(0, 1e4).map(lambda x: round(x, 6))


@given(st.lists(st.tuples(TIMES, st.integers(1, 5)), max_size=5), st.text(), st.none() | st.text(min_size=1))
def test_a_row_survives(arrivals, text, error):
    row = RequestRow(
        index=3, start_s=0.5, arrivals=[t for t, _ in arrivals], counts=[c for _, c in arrivals], text=text,
        error=error, first_s=0.75, end_s=1.25, output_tokens=3, token_ids=[1, 2, 3], logprobs=[None, -0.1],
    )  # fmt: skip
    again = RequestRow.from_json(json.loads(json.dumps(row.to_json())) | {"later": 1})
    assert again == row
    assert (again.ttft_s, again.e2el_s, again.tpot_s) == (0.25, 0.75, 0.25)


def summary() -> Summary:
    comparison = Comparison(
        metric="output_throughput", unit="tok/s", better="higher", a=1.0, b=2.0, ratio=2.0, ci_low=float("nan"),
        ci_high=float("inf"), verdict="screening", smallest_effect_pct=1.0, primary=True,
    )  # fmt: skip
    return Summary(
        title="t",
        created="now",
        provenance={"commit": None},
        arms=[ArmInfo(name="a", url="http://x"), ArmInfo(name="b", command="c", env={"X": "1"})],
        schedule=["A1", "B1"],
        runs=[RunResult(run="A1", arm="a", metrics={"duration": 1.5, "median_tpot_ms": None})],
        control=Control(metric="output_throughput", spread_pct=0.5),
        comparison=[comparison],
    )


def test_a_summary_survives(tmp_path):
    place = RunDir.start(tmp_path / "run", "title = 'x'")
    place.write_summary(summary())
    json.loads(
        (tmp_path / "run/summary.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON")
    )
    again = RunDir.open(tmp_path / "run").read_summary()
    assert math.isnan(again.comparison[0].ci_low)
    assert again.arms == summary().arms
    assert again.runs == summary().runs
    assert again.control == summary().control


def test_finished_runs_and_rows(tmp_path):
    place = RunDir.start(tmp_path, "x = 1")
    rows = [RequestRow(index=0, start_s=0.0), RequestRow(index=1, start_s=1.0, error="e")]
    place.write_rows("requests", "a-1", (row.to_json() for row in rows))
    assert not place.finished("a-1")
    place.finish("a-1", {"counters": {"x": 1.0}})
    again = RunDir.start(tmp_path, "x = 1")
    assert again.finished("a-1")
    assert again.read_requests("a-1") == rows
    assert again.read_counters("a-1") == {"counters": {"x": 1.0}}
    assert again.read_rows("exact", "a-1") == []
    assert not list(tmp_path.rglob("*.part"))


def test_what_is_refused(tmp_path):
    RunDir.start(tmp_path / "run", "x = 1")
    with pytest.raises(ValueError, match="another spec"):
        RunDir.start(tmp_path / "run", "x = 2")
    with pytest.raises(ValueError, match="no run directory"):
        RunDir.start(tmp_path, "x = 1")
    with pytest.raises(ValueError, match="no run directory"):
        RunDir.open(tmp_path)
    with pytest.raises(ValueError, match="no run has finished"):
        RunDir.open(tmp_path / "run").read_summary()
    (tmp_path / "run/summary.json").write_text('{"format": "other/2"}')
    with pytest.raises(ValueError, match="other/2"):
        RunDir.open(tmp_path / "run").read_summary()
    (tmp_path / "run/summary.json").write_text('{"format": "anabranch-run/1", "arms": []}')
    with pytest.raises(ValueError, match="incomplete"):
        RunDir.open(tmp_path / "run").read_summary()
