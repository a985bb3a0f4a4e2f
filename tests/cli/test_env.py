"""`anabranch env`: versions, devices, operations and the reason for each choice."""

import json
import platform
import subprocess
from types import SimpleNamespace

import pytest
import torch
from helpers.configs import small_k3
from typer.testing import CliRunner

import anabranch
from anabranch.cli import env
from anabranch.cli.main import app
from anabranch.config.hf import parse_model_config
from anabranch.ops.registry import OP_NAMES, select


def document():
    result = CliRunner().invoke(app, ["env", "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_versions_are_those_that_run():
    doc = document()
    assert (doc["anabranch"], doc["python"]) == (anabranch.__version__, platform.python_version())
    assert doc["packages"]["torch"] == torch.__version__
    assert list(doc["packages"]) == ["torch", "triton", "numpy", "safetensors", "tokenizers"]
    assert doc["torch_cuda"] == torch.version.cuda


def test_every_operation_has_a_choice_and_a_reason_in_both_modes():
    ops = {op["name"]: op for op in document()["ops"]}
    assert list(ops) == list(OP_NAMES)
    for mode, deterministic in (("chosen", False), ("deterministic", True)):
        choices = select(parse_model_config(small_k3()), torch.device("cpu"), deterministic=deterministic).chosen
        assert {name: (op[mode]["implementation"], op[mode]["reason"]) for name, op in ops.items()} == choices
    for op in ops.values():
        assert op["chosen"]["implementation"] in op["implementations"]
    assert ops["linear"]["chosen"]["implementation"] == "reference"
    assert ops["linear"]["deterministic"]["implementation"] == "deterministic"
    assert "reference: not batch-invariant" in ops["linear"]["deterministic"]["reason"]


def test_cpu_and_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    doc = document()
    cpu = doc["devices"][-1]
    assert cpu["kind"] == "cpu"
    assert cpu["name"]
    assert cpu["cores"] >= doc["threads"]["usable_cpus"] >= 1
    assert cpu["memory_bytes"] > 2**28
    assert (doc["threads"]["torch"], doc["threads"]["OMP_NUM_THREADS"]) == (torch.get_num_threads(), "7")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU changes the default")
def test_the_default_dtype_on_a_cpu():
    doc = document()
    assert [d["kind"] for d in doc["devices"]] == ["cpu"]
    assert doc["dtype"] == {"default": "float32", "reason": "no GPU, and float32 holds every bfloat16 weight"}


def test_gpus_come_first_and_change_the_default(monkeypatch):
    gpu = SimpleNamespace(name="H", major=9, minor=0, multi_processor_count=132, total_memory=150_000_000_000)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(env, "_driver", lambda: "570.1")
    doc = document()
    assert [d["kind"] for d in doc["devices"]] == ["cuda", "cuda", "cpu"]
    assert doc["devices"][0] == {
        "kind": "cuda", "name": "H", "capability": "9.0", "sm_count": 132, "memory_bytes": 150_000_000_000,
        "driver": "570.1",
    }  # fmt: skip
    assert doc["dtype"]["default"] == "the checkpoint's"


def test_extras_are_looked_up_without_importing(monkeypatch):
    monkeypatch.setattr(
        env.metadata, "requires", lambda name: ["torch>=2", "PyTest>=8; extra == 'a'", 'no_such; extra == "b"']
    )
    monkeypatch.setattr(env.metadata, "packages_distributions", lambda: {"pytest": ["pytest"], "gone": ["no-such"]})
    assert env._extras() == {"a": {"PyTest": True}, "b": {"no_such": False}}


def test_commit_and_dirt_of_a_source_tree(tmp_path):
    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    assert env._source(tmp_path) == {"commit": None, "dirty": None}
    git("init")
    assert env._source(tmp_path) == {"commit": None, "dirty": False}
    (tmp_path / "file").write_text("1")
    assert env._source(tmp_path) == {"commit": None, "dirty": True}
    git("add", "file")
    git("commit", "-m", "one")
    found = env._source(tmp_path)
    assert (len(found["commit"]), found["dirty"]) == (40, False)


def test_text_says_the_same(monkeypatch):
    monkeypatch.setattr(env, "_version", lambda name: None if name == "triton" else "1.2")
    out = CliRunner().invoke(app, ["env"]).stdout
    assert out.startswith(f"anabranch {anabranch.__version__} (")
    assert "torch 1.2, triton absent" in out
    assert "reference: not batch-invariant" in " ".join(out.split())
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 100
