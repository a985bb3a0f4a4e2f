"""The streamed products of few pairs compiled for an H200: nothing spills, and products stay asynchronous."""


def test_the_kernels_fit_and_nothing_spills(assembled):
    """Shared memory is asserted in the source."""
    report, kernels = assembled("experts")
    assert "Potential Performance Loss" not in report, "the compiler waits for a product before the next may start"
    streamed = [kernel for kernel in kernels if "stream" in kernel[0]]
    assert len(streamed) == 2
    for name, registers, spilled in streamed:
        assert spilled == 0, name
        assert registers * 352 <= 65_536, name
