"""The CUDA prefill compiled for an H200: nothing spills in a loop, and products stay asynchronous."""

import re

import pytest

from anabranch.ops import native

# kernel, threads, CTAs an SM, bytes spilled: what the helper warps of the chain's whole heads keep of 40 registers
KERNELS = (
    ("kda_prepare_kernel", 256, 2, 0),
    ("kda_chain_kernelILi1E", 256, 1, 0),
    ("kda_chain_kernelILi2E", 384, 1, 40),
)


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
    for name, threads, resident, allowed in KERNELS:
        stores, loads, registers = next(tuple(int(n) for n in rest) for kernel, *rest in found if name in kernel)
        assert stores + loads <= allowed, name
        assert registers * threads * resident <= 65536, name
