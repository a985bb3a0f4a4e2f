"""One token's experts compiled for an H200: nothing spills, and blocks fit a multiprocessor."""

import re

from anabranch.ops import native
from anabranch.ops.expert_ffn.plan import MOST_DOWN_WARPS, MOST_WARPS

QUARTER = 16_384  # registers of a quarter of a multiprocessor, where every fourth warp of a block goes
SHARED = 64 * 1024  # what the launches ask for, of which a block loses one KB


def taken(registers: int, warps: int) -> int:
    """Registers of the fullest quarter."""
    return -(-warps // 4) * -(-registers // 8) * 8 * 32


def test_nothing_spills_and_a_block_of_each_launch_fits(assembled):
    _, kernels = assembled("expert_ffn")
    assert [kernel.spilled for kernel in kernels] == [0] * 3
    wide = max(kernel.registers for kernel in kernels if "gate_up" in kernel.name)
    (narrow,) = [kernel.registers for kernel in kernels if "down" in kernel.name]
    assert taken(wide, MOST_WARPS) <= QUARTER
    assert taken(narrow, MOST_DOWN_WARPS) <= QUARTER


def test_no_multiprocessor_gets_two_blocks_of_the_first_launch_beside_one_that_gets_none():
    source = (native.OPS / "expert_ffn/csrc/gate_up.cuh").read_text()
    (wide,) = re.findall(r"PAIR_SHARED = (\d+) \* 1024", source)
    first, second = (int(wide) + 1) * 1024, 10 * 1024 * 2 + 1024  # the latter: 9 hidden rows and one of zeros
    assert first + second <= SHARED < 2 * first
