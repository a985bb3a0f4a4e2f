"""The MXFP4 products of few pairs compiled for an H200: nothing spills, and two programs share a multiprocessor."""


def test_two_programs_fit_a_multiprocessor(assembled):
    _, kernels = assembled("mxfp4")
    assert len(kernels) == 4
    for name, registers, spilled in kernels:
        assert spilled == 0, name
        assert 2 * 192 * registers <= 65_536, name
