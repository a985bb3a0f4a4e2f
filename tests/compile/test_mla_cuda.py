"""Latent attention's CUDA kernels compiled for an H200: none spills; that they fit is asserted in the source."""

import re

import pytest

from anabranch.ops import native


@pytest.mark.skipif(native.nvcc() is None, reason="no nvcc")
def test_no_kernel_spills(monkeypatch, tmp_path):
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path))
    library, report = native.build("mla")
    assert library.exists()
    spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert spilled == [("0", "0")] * 4
    assert "setmaxnreg" not in report  # the assembler says so where it ignores it
