"""The grouped products of prompts compiled for an H200: nothing spills, and products stay asynchronous."""

import re

import pytest

from anabranch.ops import native


@pytest.mark.skipif(native.nvcc() is None, reason="no nvcc")
def test_the_kernels_fit_and_products_overlap(monkeypatch, tmp_path):
    """Shared memory is asserted in the source, as it is asked for at launch."""
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path))
    library, report = native.build("experts")
    assert library.exists()
    assert "Potential Performance Loss" not in report, "the compiler waits for a product before the next may start"
    assert "warpgroup.arrive is injected" not in report
    assert "setmaxnreg" not in report, "the consumers' registers were refused"
    pattern = r"entry function '(\S+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
    found = [use for use in re.findall(pattern, report, re.DOTALL) if re.search("grouped|sort|gather", use[0])]
    assert len(found) == 4
    for name, stores, loads, registers in found:
        assert int(stores) + int(loads) == 0, name
        assert int(registers) * (384 if "grouped_k" in name else 512) <= 65536, name
