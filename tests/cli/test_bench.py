"""`anabranch bench` and `anabranch tune` end to end on a CPU, and that a red gate prints no speed-up."""

import json
import re
from dataclasses import replace

import pytest
import torch
from helpers.configs import small_k3, small_linear
from typer.testing import CliRunner

from anabranch.cli.main import app
from anabranch.config.fusion import KDA_PATHS, MLA_PATHS
from anabranch.fusion import counters
from anabranch.fusion.costs import read_table
from anabranch.fusion.fork import Fork
from anabranch.fusion.kda_paths import KDA_FULL_RANK
from anabranch.fusion.mla_paths import MLA_GATED
from anabranch.measure import tune as tune_module
from anabranch.measure.timing import Timed
from anabranch.ops.kda_step import reference

# `single` merges nothing and is there for adapters; `deferred` needs a decode step that a CPU has only by name
LEFT_OUT = ("single", "deferred")
ARMS = {kind: [n for n in known if n not in LEFT_OUT] for kind, known in (("kda", KDA_PATHS), ("mla", MLA_PATHS))}
STEP = ("--op", "kda_step=reference")


@pytest.fixture
def k3(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(small_k3()))
    return file


@pytest.fixture
def linear(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(small_linear()))
    return file


def run(*words, status=0):
    result = CliRunner().invoke(app, [*map(str, words), "--device", "cpu"])
    assert result.exit_code == status, result.output
    return result


@pytest.mark.parametrize("kind", ["kda", "mla"])
def test_a_prologue_is_timed_on_every_path_behind_a_green_gate(k3, kind):
    arms = ARMS[kind]
    with counters.counting() as ran:
        out = run("bench", "prologue", k3, "--kind", kind, "--tp", 2, "--rows", "3,1").stdout
    assert out.startswith(f"prologue {kind}, kimi_k3 attention-TP 2, float32, eager, linear=")
    assert "gate green (tolerance)" in out
    assert re.findall(r"^M (\d+): A/A", out, re.MULTILINE) == ["1", "3"]
    assert re.findall(r"^  (\w+) +\d+ GEMMs +[\d.]+ us", out, re.MULTILINE) == arms * 2
    document = json.loads(out.splitlines()[-1])
    assert (document["device"], [row["arm"] for row in document["rows"]]) == ("cpu", arms * 2)
    for row in document["rows"]:
        assert len(row["us"]) == 21
        assert row["case"]["linear"] == "reference"
        assert row["gbs"] > 0
    # per case: both sides of the gate, a warm-up and 21 samples an arm, 7 more of the first (A/A), its twin's 29
    gemms = {row["arm"]: row["gemms"] for row in document["rows"]}
    timed = 22 * sum(gemms.values()) + (7 + 29) * gemms["separate"]
    gate = sum(gemms.values()) + len(arms) * gemms["separate"]
    assert ran[f"{kind}.gemm"] == 2 * (timed + gate)


def test_the_gate_of_a_whole_layer_is_timed_over_contexts(k3, tmp_path):
    trace = tmp_path / "trace.json"
    words = ("bench", "mla-gate", k3, "--rows", 2, "--contexts", "5,130", "--trace", trace)
    out = run(*words).stdout
    assert re.findall(r"^M 2, context (\d+): A/A", out, re.MULTILINE) == ["5", "130"]
    events = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"separate", "merged", "overlap"} <= events


def test_a_model_without_a_gate_is_refused(linear):
    assert run("bench", "mla-gate", linear, status=2).stderr == "error: kimi_linear has no MLA output gate\n"


def wrong(weights, x):
    """The `whole` path with one value of one output changed."""
    outputs = KDA_FULL_RANK["split"].run(weights, x)
    outputs.beta[0, 0] += 1.0
    return outputs


def poisoned(weights, x):
    outputs = KDA_FULL_RANK["split"].run(weights, x)
    outputs.gate[0, 0] = float("nan")
    return outputs


@pytest.mark.parametrize(("path", "name"), [(wrong, "beta"), (poisoned, "gate")])
def test_a_red_gate_prints_no_figure(k3, monkeypatch, tmp_path, path, name):
    monkeypatch.setitem(KDA_FULL_RANK, "whole", replace(KDA_FULL_RANK["whole"], run=path))
    result = run("bench", "prologue", k3, "--rows", 4, status=1)
    assert result.stdout == ""
    assert re.match(rf"gate red, nothing is timed: kda whole at M=4, {name}: \d+ of \d+ values break", result.stderr)
    table = tmp_path / "t.json"
    result = run("tune", k3, "--out", table, "--rows", 4, "--contexts", 5, "--samples", 1, status=1)
    assert "gate red, nothing is timed: kda whole" in result.stderr
    assert not table.exists()


def test_a_red_gate_of_the_whole_layer(k3, monkeypatch):
    def wrong_gate(weights, x):
        outputs = MLA_GATED["separate"].run(weights, x)
        return replace(outputs, gate=Fork.ready(outputs.gate.take() * 0.5))

    monkeypatch.setitem(MLA_GATED, "overlap", replace(MLA_GATED["overlap"], run=wrong_gate))
    result = run("bench", "mla-gate", k3, "--rows", 2, "--contexts", 9, status=1)
    assert (result.stdout, "mla overlap at M=2, context 9, output" in result.stderr) == ("", True)


ALL = ("--noise", 1e9)  # a CPU's A/A spread means nothing
TUNE = ("--tp", 2, "--rows", "1,3", "--contexts", "5,70", "--samples", 1, *ALL)


def test_tune_writes_a_table_that_plan_and_a_model_choose_by(k3, tmp_path):
    table = tmp_path / "table.json"
    result = run("tune", k3, "--out", table, *TUNE)
    assert result.stdout.startswith(f"{table}: 6 cells")
    assert [line.split()[2:5] for line in result.stderr.splitlines()] == [
        ["[1/6]", "kda", "eager"], ["[2/6]", "kda", "eager"], *([f"[{n}/6]", "mla", "eager"] for n in (3, 4, 5, 6)),
    ]  # fmt: skip
    found = read_table(table)
    assert found.device == "cpu"
    assert {(c.kind, c.rows, c.context) for c in found.cells} == {
        ("kda", 1, 5), ("kda", 3, 5), ("mla", 1, 5), ("mla", 1, 70), ("mla", 3, 5), ("mla", 3, 70),
    }  # fmt: skip
    for cell, times in found.cells.items():
        assert set(times.us) == set(ARMS[cell.kind])
    [run_entry] = found.runs
    assert run_entry["commit"] is None or len(run_entry["commit"]) == 40
    assert run_entry["ops"]["linear"] == "reference"
    words = ["plan", str(k3), "--tp", "2", "--dtype", "float32", "--fusion", f"table={table}", "--explain"]
    out = CliRunner().invoke(app, words).stdout
    assert "auto, measured on cpu: eager " in out
    assert len(re.findall(r"^  eager +[13] ", out, re.MULTILINE)) == 6


def test_tune_goes_on_where_it_stopped_and_adds_other_shapes(k3, tmp_path):
    table = tmp_path / "table.json"
    stopped = run("tune", k3, "--out", table, *TUNE, "--seconds", 0)
    assert stopped.stdout.startswith(f"{table}: no cells after 0 s; run the same command again")
    assert not table.exists()
    run("tune", k3, "--out", table, "--tp", 2, "--rows", 1, "--contexts", 5, "--samples", 1, *ALL)
    first = read_table(table)
    resumed = run("tune", k3, "--out", table, *TUNE)
    assert resumed.stderr.count("(was there)") == 2
    second = read_table(table)
    assert len(second.cells) == 6
    assert {c: second.cells[c] for c in first.cells} == first.cells
    assert len(second.runs) == 2
    run("tune", k3, "--out", table, "--rows", 1, "--contexts", 5, "--samples", 1, *ALL)
    assert len(read_table(table).cells) == 8


ONE_CELL = ("--rows", 1, "--contexts", 5, "--samples", 1, "--kinds", "kda")


def test_tune_measures_layouts_in_the_order_given_into_one_table(k3, tmp_path):
    table = tmp_path / "table.json"
    result = run("tune", k3, "--out", table, "--tp", "2,1", *ONE_CELL, *ALL)
    assert [line.split()[:3] for line in result.stderr.splitlines()] == [["tp", n, "[1/1]"] for n in "21"]
    assert result.stdout.startswith(f"{table}: 2 cells; use it with")
    assert [cell.kind for cell in read_table(table).cells] == ["kda"] * 2
    assert len({cell.shape for cell in read_table(table).cells}) == 2


def test_a_cell_without_a_path_that_is_allowed_now_is_measured_again(k3, tmp_path):
    table = tmp_path / "table.json"
    run("tune", k3, "--out", table, *ONE_CELL, *ALL)
    [before] = read_table(table).cells.values()
    assert "deferred" not in before.us
    with counters.counting() as ran:
        assert "(was there)" not in run("tune", k3, "--out", table, *ONE_CELL, *ALL, *STEP).stderr
    assert ran["kda.deferred"] > 0
    assert ran["kda.f_b_in_step"] == ran["kda.deferred"]
    [after] = read_table(table).cells.values()
    assert set(after.us) == {*before.us, "deferred"}
    assert len(read_table(table).runs) == 2
    assert "(was there)" in run("tune", k3, "--out", table, *ONE_CELL, *ALL, *STEP).stderr
    assert "(was there)" in run("tune", k3, "--out", table, *ONE_CELL, *ALL).stderr  # more than is allowed is no fault


def test_a_cell_whose_spread_says_nothing_is_not_written(k3, tmp_path, monkeypatch):
    table = tmp_path / "table.json"
    times = Timed(us={name: [100.0] for name in ARMS["kda"]}, spread_us=7.0)
    monkeypatch.setattr(tune_module, "interleave", lambda arms, samples: times)
    result = run("tune", k3, "--out", table, *ONE_CELL)
    assert "A/A 7.0 us (noise, dropped)" in result.stderr
    assert result.stdout.startswith(f"{table}: 0 cells, 1 dropped as noise")
    assert not table.exists()
    assert "1 cells; use it" in run("tune", k3, "--out", table, *ONE_CELL, "--noise", 7).stdout
    assert len(read_table(table).cells) == 1


def test_a_step_that_does_not_do_what_was_left_to_it_is_a_red_gate(k3, monkeypatch, tmp_path):
    right = reference.kda_step
    monkeypatch.setattr(reference, "kda_step", lambda *a, f_b, **k: right(*a, f_b=None if f_b is None else -f_b, **k))
    result = run("tune", k3, "--out", tmp_path / "t.json", *ONE_CELL, *STEP, status=1)
    assert "gate red, nothing is timed: kda layer, deferred at M=1, output" in result.stderr


def test_a_prologue_alone_does_not_time_what_is_left_to_the_step(k3):
    out = run("bench", "prologue", k3, "--rows", 1, *STEP).stdout
    assert {row["arm"] for row in json.loads(out.splitlines()[-1])["rows"]} == set(ARMS["kda"])


def test_a_model_without_a_gate_has_no_mla_path_to_tune(linear, tmp_path):
    message = "error: kimi_linear has no MLA output gate: there is no MLA path to choose\n"
    assert run("tune", linear, "--kinds", "mla", "--out", tmp_path / "t.json", status=2).stderr == message


def test_tune_refuses_a_table_of_another_device(k3, tmp_path):
    table = tmp_path / "table.json"
    run("tune", k3, "--out", table, "--rows", 1, "--contexts", 5, "--samples", 1, *ALL)
    document = json.loads(table.read_text())
    table.write_text(json.dumps(document | {"device": "NVIDIA H200"}))
    result = run("tune", k3, "--out", table, *TUNE, status=2)
    assert result.stderr == f"error: cost table {table} was measured on NVIDIA H200, this is cpu\n"
    assert json.loads(table.read_text())["cells"] == document["cells"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("bench", "prologue", "--kind", "ffn"), "kind='ffn': accepted are kda, mla"),
        (("bench", "prologue", "--rows", "0"), "rows='0': need positive numbers with commas between them"),
        (("bench", "mla-gate", "--contexts", "a"), "contexts='a': need positive numbers with commas between them"),
        (("bench", "prologue", "--tp", "3"), "KDA heads (num_heads)=4 is not divisible by attention-TP"),
        (("bench", "prologue", "--op", "linear=no"), "op linear=no: accepted are "),
        (("tune", "--kinds", "kda,ffn", "--out", "t"), "kinds='kda,ffn': accepted are kda, mla, with commas between"),
        (("tune", "--tp", "1,x", "--out", "t"), "tp='1,x': need positive numbers with commas between them"),
        (("tune", "--mode", "fast", "--out", "t"), "mode='fast': accepted are both, graph, eager"),
        (("tune", "--mode", "graph", "--out", "t"), "mode='graph': cpu has no graphs; accepted is eager"),
    ],
)
def test_bad_options_are_one_line_and_status_2(k3, words, message):
    at = 2 if words[0] == "bench" else 1
    result = run(*words[:at], k3, *words[at:], status=2)
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1


def test_a_device_that_is_not_there(k3):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = CliRunner().invoke(app, ["bench", "prologue", str(k3), "--device", "cuda"])
    assert (result.exit_code, "this machine has 0 CUDA devices" in result.stderr) == (2, True)
