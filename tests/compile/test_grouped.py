"""The grouped products of prompts compiled for an H200: nothing spills, and products stay asynchronous."""


def test_the_kernels_fit_and_products_overlap(assembled):
    """Shared memory is asserted in the source, as it is asked for at launch."""
    report, kernels = assembled("experts")
    assert "Potential Performance Loss" not in report, "the compiler waits for a product before the next may start"
    assert "warpgroup.arrive is injected" not in report
    assert "setmaxnreg" not in report, "the consumers' registers were refused"
    assert len(kernels) == 4
    for name, registers, spilled in kernels:
        assert spilled == 0, name
        assert registers * (384 if "grouped" in name else 512) <= 65536, name
