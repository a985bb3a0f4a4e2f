"""Kernels compiled for an H200 without one: `pytest tests/compile`, in a process of its own and not interpreted."""

import os
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore_glob = ["test_*.py"]
else:
    from helpers.compile_sm90 import Compiled, record


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> "Compiled":
    """The kernels that the test's launches compile, in order."""
    return record(monkeypatch, tmp_path)
