"""The few-token router compiled for an H200: nothing spills, and blocks fit beside those of their neighbours."""

import re

FILE = 65_536  # registers of a multiprocessor
EXPERTS = 12 * 32 * 96  # what a block of one token's experts takes of them (ops/expert_ffn)
PROJECTION = 10 * 32 * 40  # at most, a block of the projection in front (ops/skinny_gemm) up to 8 tokens


def test_nothing_spills_and_blocks_fit_beside_their_neighbours(assembled):
    _, kernels = assembled("router")
    assert len(kernels) == 5
    taken = {}
    for name, registers, spilled in kernels:
        assert spilled == 0, name
        (key,) = re.findall(r"ILi(\d)ELi\d+ELi(\d)E", name)
        taken[tuple(map(int, key))] = -(-registers // 8) * 8 * 256
    assert set(taken) == {(2, 1), (2, 2), (2, 4), (2, 8), (4, 1)}
    assert taken[2, 1] + EXPERTS <= FILE
    assert max(taken.values()) + PROJECTION <= FILE
