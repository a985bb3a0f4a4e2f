"""Whole comparisons of scripted servers: a planted slow-down, A against A, faults, a crash, and no orphans."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.scripted import Running, Script

from anabranch.evidence.ab import run_ab
from anabranch.evidence.compare import summarise
from anabranch.evidence.rundir import RunDir
from anabranch.evidence.servers import served
from anabranch.evidence.spec import ArmSpec, parse_spec

SCRIPTED = Path(__file__).parents[1] / "helpers" / "scripted.py"
LOAD = """
[load]
num_prompts = 4
random_input_len = 4
random_output_len = 6
max_concurrency = 4
[schedule]
warmups = 1
"""


class Log(list):
    def run(self, run, done, total):
        self.append(run.label)

    def step(self, *_):
        pass


def compare(tmp_path, text: str):
    log, place = Log(), RunDir.start(tmp_path / "run", text)
    return asyncio.run(run_ab(parse_spec(text), place, log)), log, place


def between(tmp_path, a: Script, b: Script, more: str = ""):
    with Running(a) as one, Running(b) as two:
        text = f'[arms.old]\nurl = "{one.url}"\n[arms.new]\nurl = "{two.url}"\n{LOAD}{more}'
        return *compare(tmp_path, text), one.app, two.app


def verdict(summary, metric):
    return next(each for each in summary.comparison if each.metric == metric)


def test_a_planted_slow_down_is_found(tmp_path):
    summary, log, _, a, b = between(tmp_path, Script(tpot=0.1), Script(tpot=0.11))
    assert log == ["C1", "C2", "C3", "C4", "A1", "B1", "A2", "B2", "A3", "B3"]
    tpot = verdict(summary, "median_tpot_ms")
    assert tpot.verdict == "slower"
    assert 1.05 < tpot.ratio < 1.15
    assert 1.0 < tpot.ci_low < tpot.ratio < tpot.ci_high
    assert verdict(summary, "output_throughput").primary
    assert not any("faster" in each.verdict for each in summary.comparison)
    assert summary.control.metric == "output_throughput"
    assert len(summary.control.pairs_pct) == 2
    # both arms of a pair are asked the same, and every pair something else
    asked = [[tuple(body["prompt"]) for body in app.bodies if body["max_tokens"] == 6] for app in (a, b)]
    formal = [set(asked[1][i + 1 : i + 5]) for i in (0, 5, 10)]
    assert all(prompts <= set(asked[0]) for prompts in formal)
    assert not formal[0] & formal[1]


def test_a_against_a_and_its_raw_rows(tmp_path):
    summary, _, place, _, _ = between(tmp_path, Script(tpot=0.03), Script(tpot=0.03), "pairs = 2\ncontrol = 1\n")
    assert {each.verdict for each in summary.comparison} == {"no difference shown"}
    again = summarise(parse_spec((place.path / "spec.toml").read_text()), place)
    assert again.comparison == summary.comparison
    assert sum(row.output_tokens for row in place.read_requests("new-2")) == 24
    assert place.read_counters("new-2")["counters"]["requests"] == 4
    assert place.read_counters("new-2")["token_basis"] == "ids"


def test_a_planted_token_is_found(tmp_path):
    quick, more = {"tpot": 0.001}, "pairs = 2\ncontrol = 0\n[exact]\nprompts = 6\ntokens = 9\ninput_len = 5\n"
    summary, *_ = between(tmp_path, Script(**quick), Script(**quick, wrong_token_at=7), more)
    assert (summary.exact["oracle"], summary.exact["verdict"]) == (True, "different")
    assert summary.exact["pairs"][0]["first_difference"]["position"] == 7
    assert any("no A/A control" in line for line in summary.warnings)


def test_one_pair_is_a_screening(tmp_path):
    summary, *_ = between(tmp_path, Script(tpot=0.001), Script(tpot=0.05), "pairs = 1\ncontrol = 0\n")
    assert {each.verdict for each in summary.comparison} == {"screening"}
    assert any("screening" in line for line in summary.warnings)


@pytest.mark.parametrize(("script", "words"), [
    (Script(tpot=0.001, fail={5}), "requests failed"),
    (Script(tpot=0.001, cached=3), "came from a cache"),
])  # fmt: skip
def test_faults_make_a_comparison_void(tmp_path, script, words):
    summary, *_ = between(tmp_path, Script(tpot=0.001), script, "pairs = 2\ncontrol = 1\n")
    assert {each.verdict for each in summary.comparison} == {"void"}
    assert any(words in line for line in summary.warnings)


def test_expected_counters(tmp_path):
    with Running(tpot=0.001) as server:
        arms = f'[arms.a]\nurl="{server.url}"\n[arms.b]\nurl="{server.url}"\nchanges=["x", "y"]\n'
        rules = 'expect = {requests = "4", "kda.whole" = ">0", typo = "0"}\n'
        summary, *_ = compare(tmp_path, arms + rules + LOAD + "pairs = 1\ncontrol = 0\n")
    assert next(run for run in summary.runs if run.run == "B1").faults == [
        "counter kda.whole is not exposed, expected >0"
    ]
    assert any("'typo'" in line for line in summary.warnings)
    assert any("none of them alone" in line for line in summary.warnings)


def command(**options) -> str:
    words = " ".join(f"--{name} {value}" for name, value in options.items())
    return f"{sys.executable} {SCRIPTED} --port {{port}} {words}"


def test_servers_are_started_for_each_run_and_runs_are_not_repeated(tmp_path):
    cache = tmp_path / "baseline"
    cache.mkdir()
    (cache / "tuned").write_text("x")
    arm = f'command = "{command(ttft=0.001, tpot=0.001)}"\ncaches = {{TUNED = "{cache}"}}\n'
    text = f"[arms.a]\n{arm}[arms.b]\n{arm}{LOAD}pairs = 1\ncontrol = 0\n"
    summary, _, place = compare(tmp_path, text)
    assert [run.metrics["completed"] for run in summary.runs] == [4, 4]
    assert "scripted server on" in (place.path / "logs/a-1.log").read_text()
    assert not list((place.path / "caches").iterdir())
    stamp = place.file("requests", "a-1").stat().st_mtime_ns
    place.file("counters", "b-1").unlink()
    summary, _, place = compare(tmp_path, text)
    assert place.file("requests", "a-1").stat().st_mtime_ns == stamp
    assert len(summary.runs) == 2


def test_every_run_has_its_own_copy_of_the_caches(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "tuned").write_text("kept")
    script = "import os, pathlib, sys; p = pathlib.Path(os.environ['TUNED'], 'tuned'); print(p.read_text()); "
    script += "p.write_text('new'); sys.exit(3)"
    arm = ArmSpec(
        name="a", command=f'{sys.executable} -c "{script}" {{port}}', caches={"TUNED": str(tmp_path / "base")}
    )

    async def go():
        async with served(arm, tmp_path, "a-1"):
            raise AssertionError("it ends at once")

    with pytest.raises(ValueError, match=r"ended \(3\): kept"):
        asyncio.run(go())
    assert (tmp_path / "base" / "tuned").read_text() == "kept"
    missing = ArmSpec(name="a", command="x {port}", caches={"T": str(tmp_path / "none")})
    with pytest.raises(ValueError, match="no such folder"):
        asyncio.run(served(missing, tmp_path, "a-1").__aenter__())
    with pytest.raises(ValueError, match="no such program"):
        asyncio.run(served(ArmSpec(name="a", command="no-such {port}"), tmp_path, "a-1").__aenter__())


def test_a_server_that_never_answers_is_ended(tmp_path):
    arm = ArmSpec(name="a", command="sleep 60 {port}", start_timeout_s=0.3, health="/health")
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"not healthy|ended"):
        asyncio.run(served(arm, tmp_path, "a-1").__aenter__())
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_a_partial_run_and_no_server(tmp_path, sign):
    arm = f'command = "{command(ttft=0.001, tpot=0.001)}"\n'
    (tmp_path / "spec.toml").write_text(f"[arms.a]\n{arm}[arms.b]\n{arm}{LOAD}settle_s = 2.0\n")
    words = [sys.executable, "-m", "anabranch.cli.main", "bench", "ab", str(tmp_path / "spec.toml")]
    words[1:3] = ["-c", "from anabranch.cli.main import run; run()"]
    tool = subprocess.Popen([*words, "--out", str(tmp_path / "run")], stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not (tmp_path / "run/counters/control-1.json").exists():
        assert time.monotonic() < end
        assert tool.poll() is None, tool.stderr.read()
        time.sleep(0.05)
    log = tmp_path / "run/logs/control-2.log"
    while not (log.exists() and log.read_text()):
        assert time.monotonic() < end
        time.sleep(0.05)
    port = log.read_text().split()[-1]
    tool.send_signal(sign)
    tool.communicate(timeout=60)
    assert tool.returncode == 130
    summary = RunDir.open(tmp_path / "run").read_summary()
    assert [run.run for run in summary.runs] == ["C1"]
    assert any("partial" in line for line in summary.warnings)
    assert not any(f"--port {port}" in text for text in _command_lines())


def _command_lines() -> list[str]:
    found = []
    for process in os.listdir("/proc"):
        if process.isdecimal():
            try:
                found.append(Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
    return found
