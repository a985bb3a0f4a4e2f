"""Latent attention's CUDA kernels compiled for an H200: none spills; that they fit is asserted in the source."""


def test_no_kernel_spills(assembled):
    report, kernels = assembled("mla")
    assert [kernel.spilled for kernel in kernels] == [0] * 4
    assert "setmaxnreg" not in report  # the assembler says so where it ignores it
