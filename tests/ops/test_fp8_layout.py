"""Layouts of the CUDA block-FP8 product: every one that may be launched is legal on Hopper and covers each row once."""

import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.ops import native
from anabranch.ops.fp8_linear import cuda, layout, reference
from anabranch.ops.fp8_linear.reference import BLOCK
from anabranch.ops.skinny_gemm.configs import H200, HEADER, MAX_STAGES, SHARED, Clusters

SOURCE = native.OPS / "fp8_linear/csrc/fp8_linear.cu"
ROWS = st.integers(2, 7000).map(lambda groups: groups * 8)
COLUMNS = st.sampled_from([256, 512, 768, 1024, 1536, 2304, 3584, 4096, 6144, 7168, 12288])
DEVICES = st.sampled_from([H200, Clusters(57, 26, 0), Clusters(8, 4, 0), Clusters(1, 1, 0)])


def check(found: layout.Layout, rows: int, columns: int, device: Clusters) -> None:
    """Tiles disjoint and complete, two heights at most, and shared memory for every byte that is read."""
    tiles = found.clusters * found.XR * found.passes
    edges = [i * (rows // 8) // tiles * 8 for i in range(tiles + 1)]
    heights = {hi - lo for lo, hi in pairwise(edges)}
    tallest = max(heights)
    assert edges[-1] == rows
    assert {tallest - height for height in heights} <= {0, 8}
    assert min(heights) >= 8
    assert tallest <= 64 * found.WGS
    assert found.clusters <= device.of(2 * found.XR)
    blocks = columns // BLOCK
    parts = [hi - lo for lo, hi in pairwise(blocks * i // 4 for i in range(5))]
    assert parts[0] + parts[1] == blocks // 2, "each CTA has two whole parts"
    assert all(part % found.KB == 0 for part in parts), "a stage lies in one part"
    stage = found.KB * (tallest + 2 * found.T) * 128
    stages = found.ring // stage
    assert found.ring == stages * stage
    assert 2 <= stages <= MAX_STAGES
    touched = max((lo % BLOCK + found.WGS * 64 - 1) // BLOCK + 1 for lo in edges[:-1])
    kept = (found.WGS + 1) // 2 + 1
    assert touched <= kept, "scale blocks under a tile"
    scales = found.passes * kept * blocks // 2 * 4
    assert HEADER + found.ring + found.T * 256 * found.WGS + scales <= SHARED
    last = HEADER + (stages * found.KB - 1) * tallest * 128
    assert last + found.WGS * 64 * 128 <= SHARED, "rows past a short tile's end are read"


@given(tokens=st.integers(1, 128), rows=ROWS, columns=COLUMNS, device=DEVICES)
@settings(max_examples=300, deadline=None)
def test_every_layout_is_legal(tokens, rows, columns, device):
    chosen = layout.choose(tokens, rows, columns, device)
    for found in [*layout.candidates(tokens, rows, columns, device), *([chosen] if chosen else [])]:
        assert tokens <= found.T
        assert (found.XR, found.T, found.WGS, found.KB) in layout.VARIANTS
        check(found, rows, columns, device)
    if device is H200:
        assert chosen is not None, "an H200 has a layout for every supported shape"


OTHERS = [(0, 64, 256), (129, 64, 256), (1, 20, 256), (1, 8, 256), (1, 64, 384)]


@pytest.mark.parametrize(("tokens", "rows", "columns"), OTHERS)
def test_other_shapes_have_no_layout(tokens, rows, columns):
    """No tokens, too many, rows that are no multiple of 8 or too few, an odd number of blocks."""
    assert layout.choose(tokens, rows, columns) is None


def test_the_kernel_has_every_variant_and_no_other():
    source = SOURCE.read_text()
    found = [tuple(int(n) for n in v) for v in re.findall(r"V\((\d), (\d+), (\d), (\d)\)", source)]
    assert len(set(found)) == len(found), "listed twice"
    assert set(found) == set(layout.VARIANTS)
    [line] = re.findall(r"int (XR, T, [^;]+);\n  explicit Layout", source)
    assert line.split(", ") == list(layout.Layout.__dataclass_fields__)


def test_a_borrowed_header_is_part_of_the_library(monkeypatch, tmp_path):
    """The name of the library changes with every file it is built from, those of another operation included."""
    sources = {path.relative_to(native.OPS).as_posix() for path in native._sources("fp8_linear")}
    assert {"csrc/ptx.cuh", "fp8_linear/csrc/coded.cuh", "skinny_gemm/csrc/skinny.cuh"} <= sources
    assert "skinny_gemm/csrc/skinny_gemm.cu" not in sources
    for name in ("csrc", "one/csrc", "two/csrc"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "one/csrc/one.cu").write_text('#include "../two/csrc/two.cuh"\n')
    (tmp_path / "two/csrc/two.cuh").write_text("int two;")
    monkeypatch.setattr(native, "OPS", tmp_path)
    before = native.library("one")
    (tmp_path / "two/csrc/two.cuh").write_text("int three;")
    assert native.library("one") != before


def test_what_cannot_be_multiplied_is_told_from_what_can(monkeypatch):
    """dtypes, strides and alignment; a device of few multiprocessors has no clusters of four, so no wide tile."""
    monkeypatch.setattr(cuda, "_clusters", lambda device: H200)
    cuda._always.cache_clear()
    codes, scale = reference.quantize(torch.randn(256, 512))
    x = torch.zeros(4, 512 + 8, dtype=torch.bfloat16)
    assert cuda.fits(x[:, 8:], codes, scale)
    assert cuda.fits(x[1:, :512], codes[128:], scale[1:])
    for bad in (x[:, 4:516], x[:, :512].float(), x[:, :512].T.contiguous().T):
        assert not cuda.fits(bad, codes, scale)
    assert not cuda.fits(x[:, :512], codes, scale.double())
    assert not cuda.fits(x[:, :512], codes[:100], scale)
    assert not cuda.fits(x[:, :384], codes[:, :384].contiguous(), scale[:, :3])
    monkeypatch.setattr(cuda, "_clusters", lambda device: Clusters(4, 0, 0))
    cuda._always.cache_clear()
    assert not cuda.fits(x[:, 8:], codes, scale)
    cuda._always.cache_clear()
