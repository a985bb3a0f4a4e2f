"""Block-FP8 checkpoints and LoRA adapters through the commands: what is printed, and one line for what does not fit."""

import json

import pytest
from helpers.adapters import random_pairs, write_adapter
from typer.testing import CliRunner

from anabranch.cli.main import app
from anabranch.config.hf import load_model_config
from anabranch.models.tiny import init_checkpoint


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module", params=["kl", "k3"])
def checkpoint(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    init_checkpoint(request.param, path, fp8=True)
    return request.param, path


def test_plan_shows_codes_and_reasons(checkpoint):
    _, path = checkpoint
    out = invoke("plan", path).stdout
    assert "rows x 64 block-FP8: q 128 | k 128 | v 128" in out
    assert "chosen: split" in out
    assert "q_proj is block-FP8 and f_a_proj is bfloat16: merging would lose its scales" in " ".join(out.split())
    assert "dequantised at load: kept plain" in " ".join(out.split())
    document = json.loads(invoke("plan", path, "--json").stdout)
    buffers = document["prologues"][0]["buffers"]
    assert [b["format"] for b in buffers] == ["block-FP8", "bfloat16", "bfloat16"]
    # one byte a weight, and four for each of the blocks
    assert buffers[0]["bytes"] == buffers[0]["rows"] * 64 + 4 * buffers[0]["rows"] // 128
    refused = invoke("plan", path, "--fusion", "kda=whole")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: fusion kda=whole cannot be honoured: q_proj is block-FP8")


def test_generate_from_codes(checkpoint):
    _, path = checkpoint
    done = invoke("generate", path, "hello", "--json", "-n", 4, "--temperature", 0, "--ignore-eos")
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["token_ids"]) == 4


def test_an_adapter_changes_answers_and_the_plan(checkpoint, tmp_path):
    architecture, path = checkpoint
    leaf = "g_proj" if architecture == "k3" else "g_a_proj"
    adapter = write_adapter(random_pairs(load_model_config(path), [leaf, "o_proj"]), tmp_path / "lora", lora_alpha=64)
    words = ("generate", path, "hello", "--json", "-n", 12, "--temperature", 0, "--ignore-eos", "--deterministic")
    base, tuned = (json.loads(invoke(*words, *more).stdout) for more in ((), ("--lora", adapter)))
    assert base["logprobs"] != tuned["logprobs"]
    out = " ".join(invoke("plan", path, "--lora", adapter).stdout.split())
    assert f"{leaf} carries a LoRA adapter, which a merged GEMM would bypass" in out
    assert "chosen: separate" in out


def test_an_adapter_that_does_not_fit_is_one_line(checkpoint, tmp_path):
    _, path = checkpoint
    for verb in (("generate", path, "x"), ("chat", path, "-m", "x"), ("plan", path)):
        done = invoke(*verb, "--lora", tmp_path / "gone")
        assert (done.exit_code, done.stdout) == (2, "")
        assert (
            done.stderr
            == f"error: {tmp_path / 'gone'}/adapter_config.json: no such file; need a PEFT adapter directory\n"
        )
