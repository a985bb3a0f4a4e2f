"""The verbs, from words to files and exit status."""

import json
import re

import pytest
from helpers.scripted import Running, Script
from typer.testing import CliRunner

from anabranch.cli.main import app

QUICK = {"ttft": 0.002, "tpot": 0.001}
# what scripts read from a result file of `vllm bench serve`
KEYS = re.findall(
    r"\w+",
    """
backend burstiness completed date duration endpoint_type failed label max_concurrency max_concurrent_requests
max_output_tokens_per_s mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms
p99_tpot_ms mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms mean_e2el_ms median_e2el_ms std_e2el_ms p99_e2el_ms model_id
num_prompts output_throughput request_goodput request_rate request_throughput total_input_tokens total_output_tokens
total_token_throughput
""",
)


def call(*words, status=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == status, result.output
    return result


def test_bench_serve(tmp_path):
    with Running(**QUICK) as server:
        options = ["--num-prompts", 5, "--random-input-len", 7, "--random-output-len", 4, "--max-concurrency", 2]
        files = ["--result-filename", tmp_path / "r.json", "--rows", tmp_path / "rows.jsonl"]
        out = call("bench", "serve", "--base-url", server.url, "--goodput", "ttft:9000", *options, *files).output
        assert server.app.most_open == 2
    document = json.loads(out.splitlines()[-1])
    assert document == json.loads((tmp_path / "r.json").read_text())
    assert set(KEYS) <= document.keys()
    assert (document["completed"], document["total_input_tokens"], document["total_output_tokens"]) == (5, 35, 20)
    assert (document["request_rate"], document["token_basis"], document["warnings"]) == ("inf", "ids", [])
    assert document["request_goodput"] == document["request_throughput"]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(5))
    assert all(sum(row["counts"]) == 4 for row in rows)


def test_bench_serve_of_a_server_that_fails():
    with Running(Script(**QUICK, fail={2, 3})) as server:
        options = ["--num-prompts", 2, "--random-output-len", 2, "--num-warmups", 1, "--base-url", server.url]
        out = call("bench", "serve", *options, status=1).output
    assert json.loads(out.splitlines()[-1])["failed"] == 2
    assert "planted" in out


@pytest.mark.parametrize(("words", "said"), [
    (["--base-url", "http://127.0.0.1:9"], "is the server up"),
    (["--base-url", "x"], "http://HOST:PORT"),
    (["--dataset-name", "x"], "random, custom, sharegpt"),
    (["--request-rate", "0"], "request_rate=0"),
    (["--extra-body", "[1]"], "JSON object"),
    (["--percentile-metrics", "tps"], "ttft, tpot, itl, e2el"),
    (["--metric-percentiles", "100"], "between 0 and 100"),
    (["--goodput", "x:1"], "ttft:MS"),
])  # fmt: skip
def test_bad_words(words, said):
    output = call("bench", "serve", *words, status=2).output
    assert said in output
    assert output.count("\n") == 1


def test_bench_ab_writes_a_report(tmp_path):
    with Running(**QUICK) as server:
        arms = "".join(f'[arms.{name}]\nurl = "{server.url}"\n' for name in "ab")
        load = "[load]\nnum_prompts = 3\nrandom_output_len = 4\n[schedule]\npairs = 2\ncontrol = 1\nwarmups = 0\n"
        (tmp_path / "s.toml").write_text(arms + load)
        out = call("bench", "ab", tmp_path / "s.toml", "--out", tmp_path / "run").output
    assert "schedule C1 C2 A1 B1 A2 B2" in out
    for name in ("report.html", "report.md", "report.json", "summary.json"):
        assert (tmp_path / "run" / name).stat().st_size > 500


def test_bench_ab_bad_files(tmp_path):
    assert "cannot be read" in call("bench", "ab", tmp_path / "none.toml", status=2).output
    (tmp_path / "s.toml").write_text("[arms.a]\n")
    assert "exactly two" in call("bench", "ab", tmp_path / "s.toml", status=2).output


def test_verify_exact(tmp_path):
    options = ["--prompts", 3, "--tokens", 5, "--input-len", 5]
    with Running(**QUICK) as a, Running(**QUICK) as b, Running(Script(**QUICK, random_tokens=True)) as c:
        out = call("verify", "exact", a.url, b.url, *options, "--out", tmp_path / "same").output
        assert "15 of 15 token ids and 15 of 15 logprobs identical" in out
        out = call("verify", "exact", a.url, c.url, *options, "--out", tmp_path / "other", status=1).output
        assert "first difference" in out
        out = call("verify", "exact", c.url, a.url, *options, "--out", tmp_path / "none", status=1).output
        assert "no oracle" in out
    assert "targets" in call("verify", "exact", "localhost", status=2).output


def test_eval_gsm8k(tmp_path):
    with Running(Script(**QUICK, answer="so #### 73")) as a:
        out = call("eval", "gsm8k", a.url, "--limit", 2, "--max-tokens", 3, "--out", tmp_path / "run").output
    found = json.loads(out.splitlines()[-1])
    assert found["arms"]["a"]["scores_pct"] == [50.0]
    assert (found["source"], found["questions"], found["shots"]) == ("own fixture", 2, 5)
    (tmp_path / "d").write_text("{}")
    assert "SHA-256" in call("eval", "gsm8k", "http://a", "--data", tmp_path / "d", status=2).output
