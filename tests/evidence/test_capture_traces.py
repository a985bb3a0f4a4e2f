"""scripts/capture_traces.py where there is no GPU: what it counts by itself is what the reader finds."""

import copy
import gzip
import json
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from anabranch import LLM
from anabranch.config.hf import parse_model_config
from anabranch.evidence.trace.count import count
from anabranch.evidence.trace.load import load_trace
from anabranch.evidence.trace.slice import SliceSpec, cut
from anabranch.models.tiny import init_checkpoint

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import capture_traces

SYNTHETIC = Path(__file__).parents[1] / "data/traces/synthetic_graph.json"


@pytest.fixture
def document():
    return json.loads(SYNTHETIC.read_text(), parse_float=Decimal)


def three_steps(document):
    """The synthetic graph three times as wide: a replay with more than two markers has a stretch between them."""
    wide = copy.deepcopy(document)
    rows = [row for row in wide["traceEvents"] if row.get("cat") in capture_traces.GPU]
    for shift in (1, 2):
        for row in copy.deepcopy(rows):
            row["ts"] += shift * Decimal("100.001")
            wide["traceEvents"].append(row)
    for row in wide["traceEvents"]:
        if row.get("cat") == "user_annotation":
            row["name"] = "decode step"
    return wide


def without_graphs(document):
    """The same launches, each by a call of its own inside its range."""
    eager = copy.deepcopy(document)
    calls = {r["args"]["correlation"]: r for r in eager["traceEvents"] if "GraphLaunch" in r["name"]}
    for number, row in enumerate([r for r in eager["traceEvents"] if r.get("cat") in capture_traces.GPU], 5000):
        if (call := calls.get(row["args"]["correlation"])) is not None:
            row["args"] = {**row["args"], "correlation": number}
            row["args"].pop("graph node id", None)
            launch = {**call, "name": "cudaLaunchKernel", "args": {"correlation": number}}
            eager["traceEvents"].append(launch)
    eager["traceEvents"] = [r for r in eager["traceEvents"] if "GraphLaunch" not in r["name"]]
    return eager


@pytest.mark.parametrize("change", [three_steps, lambda d: without_graphs(three_steps(d))], ids=["graph", "eager"])
def test_what_is_counted_by_itself_is_what_the_reader_finds(document, change, tmp_path):
    whole = change(document)
    small = capture_traces.trimmed(whole)
    says = capture_traces.expected(small, marker="rms_norm")
    size = capture_traces.save(small, says, tmp_path, "it")
    assert size == (tmp_path / "it.json.gz").stat().st_size
    says = json.loads((tmp_path / "it.expect.json").read_text())
    made = load_trace(tmp_path / "it.json.gz")
    assert all(c.ok for c in count([made], [f"{name}={number}" for name, number in says["counts"].items()]))
    assert says["counts"]["."] == len(made.events) > 12
    assert made.devices == {0: says["device"]}
    (piece,) = cut([made.on()], SliceSpec(marker=says["slice"]["marker"]), says.get("step"))
    assert len(piece.representative.events) == says["slice"]["launches"] == 4
    assert ("step" in says) == (not any(e.graph for e in made.events))
    # nothing that the reader would have seen is lost, to the nanosecond
    (tmp_path / "whole.json").write_text(capture_traces.text_of(whole))
    assert load_trace(tmp_path / "whole.json").events == made.events


def test_a_recording_keeps_only_what_is_read(document):
    small = capture_traces.trimmed(three_steps(document))
    assert {name for row in small["traceEvents"] for name in row} <= {*capture_traces.KEPT, "args"}
    assert {name for row in small["traceEvents"] for name in row["args"]} <= set(capture_traces.ARGUMENTS)
    assert len(capture_traces.text_of(small)) < SYNTHETIC.stat().st_size * 2


def test_what_contradicts_itself_is_refused(document, tmp_path, monkeypatch):
    small = capture_traces.trimmed(three_steps(document))
    says = capture_traces.expected(small, marker="rms_norm")
    assert says["counts"]["kda_step"] == 12
    capture_traces.check(small, says, kda_layers=6, steps=2)
    with pytest.raises(ValueError, match="12 launches of kda_step in 2 ranges; 2 steps of 5 layers are 10"):
        capture_traces.check(small, says, kda_layers=5, steps=2)
    with pytest.raises(ValueError, match="2 steps have no commonest stretch from 'absent' to the next"):
        capture_traces.expected(small, marker="absent")
    monkeypatch.setattr(capture_traces, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match="more than 100; record fewer --steps"):
        capture_traces.save(small, says, tmp_path, "it")
    assert list(tmp_path.iterdir()) == []


def test_a_recording_of_an_engine_has_a_range_for_each_step(tmp_path):
    init_checkpoint("k3", tmp_path / "tiny", seed=0)
    llm = LLM(tmp_path / "tiny", max_seqs=1, max_len=128, prefix_cache=False)
    recorded = capture_traces.record(llm, 3)
    ranges = [row for row in recorded["traceEvents"] if row.get("cat") == "user_annotation"]
    assert [row["name"] for row in ranges if row["name"] == "decode step"] == ["decode step"] * 3
    assert not llm.engine.busy
    path = tmp_path / "cpu.json.gz"
    path.write_bytes(gzip.compress(capture_traces.text_of(recorded).encode()))
    assert load_trace(path, "cpu").events
    assert capture_traces.trimmed(recorded)["traceEvents"], "the ranges stay"


def test_the_cut_model_has_two_periods_and_the_widths_of_a_rank():
    config = parse_model_config(capture_traces.cut_config(json.loads(capture_traces.CONFIG.read_text())))
    assert config.layer_kinds == ("kda", "kda", "kda", "mla") * 2
    assert (config.kda.heads, config.kda.head_dim, config.hidden_size) == (12, 128, 7168)
    assert (config.moe.experts, config.moe.intermediate_size, config.vocab_size) == (32, 384, 20480)
    assert max(config.eos_ids) < config.vocab_size
