"""`anabranch bench decode-step | prefill` on a CPU: what is counted, which path ran when, and what is refused."""

import importlib.util
import json
import random
import re
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
from helpers.configs import small_k3, small_linear
from typer.testing import CliRunner

from anabranch.cli.main import app
from anabranch.engine.llm import LLM
from anabranch.fusion.kda_paths import KDA_LOW_RANK
from anabranch.layers.moe import MoeFfn
from anabranch.measure.decode_step import bench_decode, step_floor_us
from anabranch.measure.launches import tally
from anabranch.measure.prefill import active_parameters, attention_flops
from anabranch.measure.step_paths import BLOCK, PathTimes, StepPaths
from anabranch.measure.touched import noting_experts, weight_bytes
from anabranch.measure.whole_model import WaveTimer, add_requests
from anabranch.models.tiny import tiny_config

SCRIPT = Path(__file__).parents[2] / "scripts/served_tpot.py"


def written(directory, raw):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


@pytest.fixture(scope="module")
def linear(tmp_path_factory):
    return written(tmp_path_factory.mktemp("linear"), small_linear())


@pytest.fixture
def llm(linear):
    return LLM(linear, load_format="dummy", device="cpu", max_seqs=4, max_len=128, prefill_chunk=16, prefix_cache=False)


def run(*words, status=0):
    result = CliRunner().invoke(app, ["bench", *map(str, words), "--device", "cpu"])
    assert result.exit_code == status, result.output
    return result


def test_a_decode_step_is_reported_and_kept(linear, tmp_path):
    rows = tmp_path / "rows.jsonl"
    words = ("--batches", "3,1", "--tokens-in", 20, "--tokens-out", 9, "--prefill-chunk", 16, "--append", rows)
    out = run("decode-step", linear, *words, "--profile", "--fusion", "kda=split").stdout
    assert re.findall(r"^decode batch +(\d+): TPOT [\d.]+, [\d.]+ ms, ([\d.]+) experts", out, re.MULTILINE)[0] == (
        "1", "2.0",  # two distinct experts a token
    )  # fmt: skip
    document = json.loads(out.splitlines()[-1])
    assert [row["case"]["batch"] for row in document["rows"]] == [1, 3]
    assert document["arm"] == "eager, split"
    for row, kept in zip(document["rows"], map(json.loads, rows.read_text().splitlines()), strict=True):
        assert row.items() <= kept.items()
        assert kept["device"] == "cpu"
        assert len(row["tpot_ms"]) == len(row["request_tpot_ms"]) == 2
        assert row["eager_steps"]["no graphs"] > 0
        assert row["ops"]["linear"] == "reference"
        assert 2 <= row["experts_touched"] <= 6
        # each wave of 9 tokens has 8 intervals, less the settling; uneven starts cost some more
        assert 2 * (8 - 2 - 4) <= len(row["us"]) <= 2 * 8


def test_the_floor_is_made_of_what_a_step_reads(llm):
    result = bench_decode(llm, 1, tokens_in=20, tokens_out=10, repeats=1, rng=random.Random(0))
    assert result.touched.experts_mean == 2
    assert {len(counts) for counts in result.touched.experts.values()} == {4}
    names = dict(llm.model.named_parameters())
    size = {name: p.numel() * p.element_size() for name, p in names.items()}
    experts = sum(s for n, s in size.items() if ".experts." in n)
    embedding = size["model.embed_tokens.weight"]
    weights = sum(size.values()) - embedding - experts * 6 / 8
    state = 3 * (2 * 4 * 8 * 8 * 4 + 5 * 4 * 8 * 2)
    latent = 25 * 24 * 4
    assert result.floor_us == pytest.approx((weights + state + latent) / 4.3e6)
    assert result.floor_us < step_floor_us(llm, 4, 25, result.touched)


def test_router_hooks_go_and_count_every_layer(llm):
    timer = WaveTimer(llm, add_requests(llm, 3, 7, 12, random.Random(1)), 4)
    timer.run()
    with noting_experts(llm.model) as touched:
        timer.steps(2)
    timer.steps(1)
    timer.end()
    assert not llm.engine.busy
    ffns = [name for name, module in llm.model.named_modules() if isinstance(module, MoeFfn)]
    assert list(touched.experts) == ffns
    assert [len(counts) for counts in touched.experts.values()] == [2] * 3
    assert touched.choices_mean == 3 * 2
    full = replace(touched, experts={name: [8] for name in ffns})
    assert weight_bytes(llm.model, full) == sum(p.numel() * p.element_size() for p in llm.model.parameters())


def test_times_a_token_are_those_of_each_request(llm):
    requests = add_requests(llm, 3, 40, 20, random.Random(2))
    wave = WaveTimer(llm, requests, 10).run()
    assert len(wave.each) == 3
    # 120 prompt tokens come in chunks of 16, so that the first answer waits for the prompts of others
    assert wave.each[0] > wave.each[2]
    assert wave.request_tpot_ms == pytest.approx(sum(wave.each) / 3 * 1e3)
    assert all(len(r.sampled) >= 10 for r in requests)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_planted_slowdown_is_found_in_the_arm_that_has_it(llm, monkeypatch, ahead):
    monkeypatch.setitem(KDA_LOW_RANK, "split", replace(KDA_LOW_RANK["split"], run=slowed(KDA_LOW_RANK["split"].run)))
    llm.engine.ahead = ahead
    arms = StepPaths(llm, ["separate", "split"])
    own = [m.prologue.choose for m in llm.model.modules() if hasattr(m, "prologue")]
    result = arms.bench(2, tokens_in=6, tokens_out=4 * BLOCK + 10, repeats=2, rng=random.Random(0))
    assert [len(turns) for turns in result.turns.values()] == [4, 4]
    # medians: other processes may take the machine for a while
    assert median(result.turns["split"]) - median(result.turns["separate"]) > 3 * 20_000 * 0.7
    assert result.gain_pct < 0
    assert result.ran["split"]["kda.split"] >= 3 * 4 * BLOCK - 6
    assert [m.prologue.choose for m in llm.model.modules() if hasattr(m, "prologue")] == own
    assert not llm.engine.busy


def slowed(run):
    def path(weights, x):
        time.sleep(0.02)
        return run(weights, x)

    return path


def test_a_gain_inside_the_spread_is_none():
    turns = {"separate": [100.0, 104.0, 100.0, 104.0], "fused": [99.0, 103.0, 99.0, 103.0]}
    result = PathTimes(batch=1, tokens_in=8, dtype="bfloat16", turns=turns, ran={"separate": {}, "fused": {}})
    assert result.gain_pct == pytest.approx(100 - 101 / 102 * 100)
    assert result.spread_pct == pytest.approx(4 / 101 * 100)
    assert "no difference" in result.line()
    assert [row["path"] for row in result.rows()] == ["separate", "fused"]
    faster = replace(result, turns=turns | {"fused": [80.0, 80.2, 80.0, 80.2]})
    assert ": +21.47 %, A/A 3.92 %" in faster.line()


def test_paths_at_the_command_line(tmp_path):
    model = written(tmp_path / "k3", small_k3())
    words = ("--batches", 2, "--tokens-in", 5, "--tokens-out", 42, "--repeats", 1)
    out = run("decode-step", model, *words, "--paths", "separate,fused+merged").stdout
    assert re.search(r"^paths batch +2: separate [\d.]+, fused\+merged [\d.]+ ms a step: ", out, re.MULTILINE)
    first, second = json.loads(out.splitlines()[-1])["rows"]
    assert (first["path"], second["path"], first["bench"]) == ("separate", "fused+merged", "step_paths")
    assert second["ran"]["kda.fused"] > 0
    assert second["ran"]["mla.merged"] > 0


def test_a_prompt_is_timed_beside_its_arithmetic(linear):
    out = run("prefill", linear, "--tokens", "9,33", "--prefill-chunk", 16, "--repeats", 1).stdout
    assert re.findall(r"^prefill +(\d+): TTFT", out, re.MULTILINE) == ["9", "33"]
    for row in json.loads(out.splitlines()[-1])["rows"]:
        assert len(row["us"]) == 1
        assert row["floor_us"] > 0


def test_active_parameters_and_attention_of_a_prompt(llm):
    size = {name: p.numel() for name, p in llm.model.named_parameters()}
    experts = sum(s for n, s in size.items() if ".experts." in n)
    rest = sum(s for n, s in size.items() if ".experts." not in n)
    ends = size["model.embed_tokens.weight"] + size["lm_head.weight"]
    assert active_parameters(llm) == pytest.approx(rest - ends + experts * 2 / 8)
    # one MLA layer of 4 heads of 16 and 8; three KDA layers of 4 heads of 8
    assert attention_flops(llm.model.config, 10) == 2 * 50 * 4 * 24 + 3 * 4 * 10 * 4 * 64


def test_launches_that_overlap_are_busy_once():
    events = [("a", 0.0, 4.0), ("b", 2.0, 6.0), ("Memcpy DtoD", 8.0, 9.0), ("a", 10.0, 12.0), ("Memset", 12.0, 13.0)]
    found = tally(events, 2)
    assert (found.kernels, found.copies, found.count) == (1.5, 1, 2.5)
    assert (found.busy_us, found.sum_us) == ((6 + 1 + 3) / 2, (4 + 4 + 1 + 2 + 1) / 2)
    assert found.table[0] == ("a", 3.0, 1.0)
    assert list(found.lines(1))[1].endswith("3 others")
    assert found.fields(1)["kernels"] == [["a", 3.0, 1.0]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batches", "0"), "batches='0': need positive numbers with commas between them"),
        (("--tokens-out", "4"), "tokens-out=4: need at least 8 to have steady steps"),
        (("--repeats", "0", "--batches", "1"), "repeats=0: need at least 1"),
        (("--paths", "separate"), "paths separate: need two arms, A,B"),
        (("--paths", "separate,quick"), "path 'quick': kda accepts separate, "),
        (("--paths", "separate,whole+merged"), "path 'whole+merged': mla accepts separate, single"),
        (("--paths", "auto,whole", "--tokens-out", "20"), "tokens-out=20: need at least 40 for arms to take turns"),
        (("--state-dtype", "int8"), "state_dtype='int8': accepted are float32, bfloat16"),
    ],
)
def test_bad_options_are_one_line_and_status_2(linear, words, message):
    result = run("decode-step", linear, "--batches", 1, *words, status=2)
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1


def served_script():
    spec = importlib.util.spec_from_file_location("served_tpot", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_served_rows_stand_beside_those_in_process(tmp_path, capsys):
    script, file = served_script(), tmp_path / "decode_step.jsonl"
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("kl")))
    case = {"batch": 4, "context": 20, "out": 9, "dtype": "float32", "experts": "plain"}
    row = {"bench": "decode_step", "case": case, "tpot_ms": [10.0], "request_tpot_ms": [20.0], "device": "d",
           "commit": "c", "arm": "a"}  # fmt: skip
    rows = [row | {"tpot_ms": [9.0]}, row, row | {"case": case | {"out": 7}}, row | {"case": case | {"batch": 1}},
            row | {"case": case | {"experts": "mxfp4"}}, row | {"arm": "a, state=bfloat16"}]  # fmt: skip
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    args = SimpleNamespace(in_process=file, tokens_in=20, tokens_out=9, concurrency=[4])
    inside = script.in_process(tmp_path, args)[4]
    assert inside["tpot_ms"] == [10.0]
    burst = {"mean_tpot_ms": 21.0, "median_itl_ms": 10.5, "mean_ttft_ms": 1.0, "output_throughput": 2.0,
             "client_lag_ms": 0.1, "token_basis": "ids"}  # fmt: skip
    made = script.compared(4, [burst, burst], inside, {"commit": "new"})
    assert made["tpot_over_in_process_pct"] == pytest.approx(5)
    assert made["step_over_in_process_pct"] == pytest.approx(5)
    assert (made["commit"], made["in_process_commit"], made["case"]["concurrency"]) == ("new", "c", 4)
    script.show(made)
    assert "served 21.00, 21.00 ms, in process 20.00 (+5.0 %)" in capsys.readouterr().out
    args.concurrency = [2]
    with pytest.raises(SystemExit, match="no decode_step row of batch 2"):
        script.in_process(tmp_path, args)
