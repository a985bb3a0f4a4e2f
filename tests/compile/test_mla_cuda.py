"""Latent attention's CUDA kernels compiled for an H200: all fit a multiprocessor, and none spills."""

import re

import pytest

from anabranch.ops import native

SHARED_LIMIT = 232_448  # bytes a block may ask for


def shared_bytes(heads: int) -> int:
    """What struct AttendSmem takes at most."""
    pitch, row = 576 * 2 + 16, 64 + 8
    return 2 * 64 * pitch + max(heads * pitch, 4 * heads * row * 4) + heads * row * 2 + heads * 4 + 8 * 5 + 128


@pytest.mark.skipif(native.nvcc() is None, reason="no nvcc")
def test_no_kernel_spills_and_all_fit(monkeypatch, tmp_path):
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path))
    library, report = native.build("mla")
    assert library.exists()
    assert shared_bytes(32) <= SHARED_LIMIT
    spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert spilled == [("0", "0")] * 4
    assert "setmaxnreg" not in report  # the assembler says so where it ignores it
