"""The verbs of single operations on the GPU: small cases end to end, by graph replay, with rows in a file."""

import json

import pytest
import torch
from typer.testing import CliRunner

from anabranch.cli.main import app
from anabranch.ops import native
from anabranch.ops.registry import Implementation

CASES = {
    "pack": (("--cases", "12x300"), {"pack", "four copies"}),
    "conv": (
        ("--cases", "12x300x3", "--tiles", "S4R8W2"),
        {"rounded", "normed", "grouped", "chain", "chain + pack, no norm", "grouped S4R8W2"},
    ),
    "kda-prefill": (
        ("--cases", "12x300x3", "--only", "chunked", "--parts", "--chains", "R64W4S1"),
        {"chunked", "chunked prepare", "chunked chain", "chunked chain R64W4S1"},
    ),
    "gate": (("--cases", "12x1,12x7"), {"triton", "torch pair"}),
    "fp8-linear": (
        ("--shapes", "kl kda tp1", "--rows", "1,130", "--tiles", "T16R64K128W4S4P"),
        {"bf16", "fp8 triton", "fp8 library", "fp8 T16R64K128W4S4P"},
    ),
}


def run(verb, *words, out):
    result = CliRunner().invoke(app, ["bench", verb, *words, "--append", str(out)])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["us"] for row in rows] == [row["us"] for row in document["rows"]]
    assert all(row["device"] == document["device"] and row["us_median"] > 0.3 for row in rows)
    return rows


@pytest.mark.parametrize("verb", CASES)
def test_a_verb_of_triton_kernels(verb, tmp_path, monkeypatch):
    monkeypatch.delenv("ANABRANCH_RESULTS", raising=False)
    words, arms = CASES[verb]
    assert {row["arm"] for row in run(verb, *words, out=tmp_path / "rows.jsonl")} >= arms


@pytest.mark.skipif(not native.verdict("kda_step").ok, reason="no CUDA kernels")
def test_every_section_of_the_decode_step(tmp_path, monkeypatch):
    monkeypatch.delenv("ANABRANCH_RESULTS", raising=False)
    verdict = Implementation(name="cuda", native="kda_step").verdict(None, torch.device("cuda"), False)
    if not verdict.ok:
        pytest.skip(verdict.reason)
    rows = run("kda-decode", "--cases", "12x3", out=tmp_path / "rows.jsonl")
    assert len(rows) == 5 + 3 + 2 * 2 + 5 + 4
    assert {row["bench"] for row in rows} == {"kda_decode", "kda_chain"}
