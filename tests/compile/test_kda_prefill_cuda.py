"""The CUDA prefill compiled for an H200: nothing spills in a loop, and products stay asynchronous."""

import re

import pytest

from anabranch.ops import native

# kernel, threads, CTAs an SM
KERNELS = (("kda_prepare_kernel", 256, 2), ("kda_chain_kernel", 256, 1))


@pytest.mark.skipif(native.nvcc() is None, reason="no nvcc")
def test_kernels_fit_and_products_overlap(monkeypatch, tmp_path):
    """Shared memory is asserted in the sources, as it is asked for at launch."""
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path))
    library, report = native.build("kda_prefill")
    assert library.exists()
    assert "Potential Performance Loss" not in report, "the compiler waits for a product before the next may start"
    assert "warpgroup.arrive is injected" not in report
    pattern = r"entry function '(\S+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
    found = re.findall(pattern, report, re.DOTALL)
    assert len(found) == len(KERNELS)
    for name, threads, resident in KERNELS:
        stores, loads, registers = next(tuple(int(n) for n in rest) for kernel, *rest in found if name in kernel)
        assert stores + loads == 0, name
        assert registers * threads * resident <= 65536, name
