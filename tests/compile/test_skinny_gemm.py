"""The few-token products compiled for an H200: no variant spills, and each fits the registers of its block."""

import re

import pytest

from anabranch.ops import native
from anabranch.ops.skinny_gemm import configs


@pytest.mark.skipif(native.nvcc() is None, reason="no nvcc")
def test_no_variant_spills(monkeypatch, tmp_path):
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path))
    library, report = native.build("skinny_gemm")
    assert library.exists()
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", report)]
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    assert len(spills) == len(registers) == len(configs.VARIANTS) + len(configs.LOW_VARIANTS) + 1
    assert set(spills) == {0}
    threads = max(wgs * 128 + 64 for *_, wgs, _ in configs.VARIANTS) + 8 * 32
    assert max(registers) * threads <= 2 * 65536
    for name, used in re.findall(r"function '(\S*skinny_kernel\S*)'.*?Used (\d+) registers", report, re.DOTALL):
        C, XR, T, WGS, KB, low = (int(n) for n in re.findall(r"L[ib](\d+)E", name)[:6])
        block = WGS * 128 + 64 + (max(4, T // 8) * 32 if low else 0)
        assert int(used) * block <= 65536, (C, XR, T, WGS, KB, low)
    assert native.library("skinny_gemm") == library, "found again by the hash of its sources"


def test_a_source_that_does_not_compile_is_reported(monkeypatch, tmp_path):
    """The compiler's words reach the caller and nothing is left in the cache."""
    if native.nvcc() is None:
        pytest.skip("no nvcc")
    (tmp_path / "broken/csrc").mkdir(parents=True)
    (tmp_path / "broken/csrc/broken.cu").write_text("int f() { return undeclared; }")
    monkeypatch.setattr(native, "OPS", tmp_path)
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path / "cache"))
    with pytest.raises(RuntimeError, match="undeclared"):
        native.build("broken")
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_without_a_compiler_the_reason_says_so(monkeypatch, tmp_path):
    """No nvcc and nothing built before: refused with a reason, and `build` says the same."""
    monkeypatch.setattr(native, "nvcc", lambda: None)
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path))
    assert "nvcc" in native.verdict("skinny_gemm").reason
    with pytest.raises(RuntimeError, match="nvcc"):
        native.build("skinny_gemm")
    path = native.library("skinny_gemm")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    assert native.verdict("skinny_gemm").ok
