"""Layouts of the few-token products: every one that may be launched is legal on Hopper and covers each row once."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import anabranch.ops.skinny_gemm as package
from anabranch.ops.skinny_gemm import configs
from anabranch.ops.skinny_gemm.spec import RANK, SEGMENTS

SOURCE = Path(package.__file__).parent / "csrc/skinny_gemm.cu"
ROWS = st.integers(1, 7000).map(lambda groups: groups * 8)
COLUMNS = st.sampled_from([256, 512, 768, 1024, 1536, 2304, 3584, 4096, 6144, 7168, 12288])
DEVICES = st.sampled_from(
    [configs.H200, configs.Clusters(57, 26, 13), configs.Clusters(8, 4, 2), configs.Clusters(1, 1, 1)]
)


def dealt(groups, tiles, first_row=0):
    """(first row, rows) of each tile, as the kernel deals groups of 8 rows."""
    edges = [first_row + i * groups // tiles * 8 for i in range(tiles + 1)]
    return [(lo, hi - lo) for lo, hi in pairwise(edges)]


def check(config, tiles, rows, columns):
    """One launch: tiles disjoint and complete, two heights at most, shared memory enough for every read."""
    tallest = max(height for _, height in tiles)
    assert sum(height for _, height in tiles) == rows
    assert tallest <= config.WGS * configs.ROWS
    blocks = columns // configs.BLOCK // config.C
    assert blocks % (config.KB * SEGMENTS // config.C) == 0, "segments hold whole stages"
    stage = config.KB * (tallest + config.T) * 128
    box = config.T * 256 * config.WGS
    stages = min(config.ring // stage, configs.MAX_STAGES)
    assert stages >= 2
    assert configs.HEADER + config.ring + box <= configs.SHARED
    # wgmma reads whole groups of 64 rows from the start of the last block
    assert configs.HEADER + (stages * config.KB * tallest + config.WGS * 64) * 128 <= configs.SHARED


@given(tokens=st.integers(1, 128), rows=ROWS, columns=COLUMNS, device=DEVICES)
@settings(max_examples=300, deadline=None)
def test_every_layout_is_legal(tokens, rows, columns, device):
    """The chosen one and all candidates."""
    chosen = configs.choose(tokens, rows, columns, device)
    layouts = [*configs.candidates(tokens, rows, columns, device), *([chosen] if chosen else [])]
    for config in layouts:
        assert tokens <= config.T
        count = config.clusters * config.XR * config.passes
        tiles = dealt(rows // 8, count)
        assert {max(h for _, h in tiles) - h for _, h in tiles} <= {0, 8}
        assert min(h for _, h in tiles) >= 8
        assert config.clusters <= device.of(config.C * config.XR)
        check(config, tiles, rows, columns)
    if device is configs.H200:
        assert chosen is not None, "an H200 has a layout for every supported shape"


@given(
    tokens=st.integers(1, 64),
    heads=st.sampled_from([3, 4, 6, 8, 12, 16, 24, 32, 48, 96]),
    low_rank_gate=st.booleans(),
    device=DEVICES,
)
@settings(max_examples=200, deadline=None)
def test_every_prologue_layout_is_legal(tokens, heads, low_rank_gate, device):
    """The tail that feeds the second product is the first tile of its clusters and no higher than the others."""
    sides, columns = (2, 2304) if low_rank_gate else (1, 7168)
    row0 = heads * RANK * (5 - sides)
    rows = row0 + -(-(RANK * sides + heads) // 16) * 16
    config = configs.choose_low_rank(tokens, rows, columns, row0, device)
    if config is None:
        assert device is not configs.H200, "an H200 has a layout for every head count"
        return
    tail = dealt((rows - row0) // 8, config.low_tiles, row0)
    main = dealt(row0 // 8, config.clusters * config.passes - config.low_tiles)
    for tiles in (tail, main):
        assert {max(h for _, h in tiles) - h for _, h in tiles} <= {0, 8}
        assert min(h for _, h in tiles) >= 8
    assert (config.C, config.XR, config.T, config.WGS, config.KB) in configs.LOW_VARIANTS
    assert max(h for _, h in tail) <= (config.WGS * 64 if config.passes == 1 else max(h for _, h in main))
    check(config, main, row0, columns)
    # clusters deal their main tiles in order: the kernel's index of (cluster, pass) is a bijection
    indices = [
        c * config.passes + p - min(config.low_tiles, c + 1)
        for c in range(config.clusters)
        for p in range(config.passes)
        if not (c < config.low_tiles and p == 0)
    ]
    assert sorted(indices) == list(range(len(main)))


def test_the_kernel_has_every_variant_and_no_other():
    """VARIANTS in the source and here name the same kernels."""
    found = re.findall(r"V\((\d), (\d), (\d+), (\d), (\d), (true|false)\)", SOURCE.read_text())
    built = {(tuple(int(v) for v in variant[:5]), variant[5] == "true") for variant in found}
    assert len(built) == len(found), "listed twice"
    assert built == {(v, False) for v in configs.VARIANTS} | {(v, True) for v in configs.LOW_VARIANTS}


def test_launch_parameters_have_the_order_of_the_struct():
    """Config's fields are those of the C++ struct, in its order."""
    [line] = re.findall(r"int (C, XR, T, [^;]+);\n  explicit Config", SOURCE.read_text())
    assert line.split(", ") == list(configs.Config.__dataclass_fields__)


@pytest.mark.parametrize(("tokens", "rows", "columns"), [(0, 64, 256), (129, 64, 256), (1, 12, 256), (1, 64, 128)])
def test_other_shapes_have_no_layout(tokens, rows, columns):
    """No tokens, too many, rows that are no multiple of 8, columns that do not make four segments."""
    assert configs.choose(tokens, rows, columns) is None


def test_choice_is_by_shape_alone():
    """Replacing launch parameters makes another config; equal shapes share one."""
    one = configs.choose(8, 6288, 7168)
    assert one is configs.choose(8, 6288, 7168)
    assert one is not None
    assert replace(one, ahead=0) != one
    assert configs.as_ints(one)[:5] == (2, 1, 8, 2, 2)
