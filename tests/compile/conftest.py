"""Kernels compiled for an H200 without one: `pytest tests/compile`, in a process of its own and not interpreted."""

import os
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore_glob = ["test_*.py"]
else:
    from helpers.compile_native import Assembled, assemble
    from helpers.compile_sm90 import Compiled, record

    from anabranch.ops import native


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> "Compiled":
    """The kernels that the test's launches compile, in order."""
    return record(monkeypatch, tmp_path)


@pytest.fixture
def assembled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> "Assembled":
    """Compiles the CUDA C++ of a folder of ops/, and nothing that was compiled before is taken for it."""
    if native.nvcc() is None:
        pytest.skip("no nvcc")
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path))
    return assemble
