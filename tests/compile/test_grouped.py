"""The grouped products of prompts compiled for an H200: nothing spills, and products stay asynchronous."""


def test_the_kernels_fit_and_products_overlap(assembled):
    """Two products for two sizes of tiles, the sort and the spread; shared memory is asserted in the source."""
    report, kernels = assembled("experts")
    assert "Potential Performance Loss" not in report, "the compiler waits for a product before the next may start"
    assert "warpgroup.arrive is injected" not in report
    assert "setmaxnreg" not in report, "the consumers' registers were refused"
    ours = [kernel for kernel in kernels if any(part in kernel.name for part in ("grouped", "sort_", "spread"))]
    assert len(ours) == 6
    for name, registers, spilled in ours:
        assert spilled == 0, name
        assert registers * (384 if "grouped" in name else 1024) <= 65536, name
