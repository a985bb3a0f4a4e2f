"""The few-token router compiled for an H200: nothing spills, and blocks fit beside those of their neighbours."""

import re

import pytest

from anabranch.ops import native

FILE = 65_536  # registers of a multiprocessor
EXPERTS = 12 * 32 * 96  # what a block of one token's experts takes of them (ops/expert_ffn)
PROJECTION = 10 * 32 * 40  # at most, a block of the projection in front (ops/skinny_gemm) up to 8 tokens


@pytest.mark.skipif(native.nvcc() is None, reason="no nvcc")
def test_nothing_spills_and_blocks_fit_beside_their_neighbours(monkeypatch, tmp_path):
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path))
    library, report = native.build("router")
    assert library.exists()
    pattern = r"entry function '(\S+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
    found = re.findall(pattern, report, re.DOTALL)
    assert len(found) == 5
    taken = {}
    for name, stores, loads, registers in found:
        assert int(stores) + int(loads) == 0, name
        (key,) = re.findall(r"ILi(\d)ELi\d+ELi(\d)E", name)
        taken[tuple(map(int, key))] = -(-int(registers) // 8) * 8 * 256
    assert set(taken) == {(2, 1), (2, 2), (2, 4), (2, 8), (4, 1)}
    assert taken[2, 1] + EXPERTS <= FILE
    assert max(taken.values()) + PROJECTION <= FILE
