"""The CUDA prefill compiled for an H200: nothing spills in a loop, and products stay asynchronous."""

# kernel, threads, CTAs an SM
KERNELS = (("kda_prepare_kernel", 256, 2), ("kda_chain_kernel", 256, 1))


def test_kernels_fit_and_products_overlap(assembled):
    """Shared memory is asserted in the sources, as it is asked for at launch."""
    report, kernels = assembled("kda_prefill")
    assert "Potential Performance Loss" not in report, "the compiler waits for a product before the next may start"
    assert "warpgroup.arrive is injected" not in report
    assert len(kernels) == len(KERNELS)
    for name, threads, resident in KERNELS:
        _, registers, spilled = next(kernel for kernel in kernels if name in kernel.name)
        assert spilled == 0, name
        assert registers * threads * resident <= 65536, name
