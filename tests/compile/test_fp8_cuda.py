"""The CUDA block-FP8 product compiled for an H200: nothing spills, and all 256 codes are widened exactly."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from anabranch.ops import native
from anabranch.ops.fp8_linear import layout
from anabranch.ops.fp8_linear.reference import CODES

REGISTERS = 64 * 1024 // 4  # of one of the four schedulers of a multiprocessor
WALK = """
#include "codes.cuh"
#include <cstdio>
int main() {
  for (unsigned pair = 0; pair < 65536; pair++) {
    const uint32_t bits = widened((uint16_t)pair);
    fwrite(&bits, 4, 1, stdout);
  }
}
"""


def test_no_variant_spills_and_each_fits_its_schedulers(assembled):
    report, kernels = assembled("fp8_linear")
    built = {}
    for name, registers, spilled in kernels:
        if "coded_kernel" in name:
            built[tuple(int(n) for n in re.findall(r"Li(\d+)E", name))] = spilled, registers
    assert set(built) == set(layout.VARIANTS)
    for (XR, T, WGS, KB), (spilled, registers) in built.items():
        assert spilled == 0, (XR, T, WGS, KB)
        warps = -(-(WGS * 4 + (4 if T * WGS >= 256 else 2)) // 4)
        assert warps * 32 * -(-registers // 8) * 8 <= REGISTERS, (XR, T, WGS, KB)
    assert "wgmma" not in report, "the assembler says so where it makes wgmma wait"
    assert "setmaxnreg" not in report, "and where it ignores a change of registers"


@pytest.mark.skipif(native.nvcc() is None, reason="no nvcc")
def test_every_pair_of_codes_is_widened_exactly(tmp_path):
    """The kernel's own function, run on the CPU: each half is the bf16 value of its code; NaN stays NaN."""
    source, program = tmp_path / "walk.cu", tmp_path / "walk"
    source.write_text(WALK)
    place = Path(native.OPS / "fp8_linear/csrc")
    done = subprocess.run(
        [str(native.nvcc()), "-std=c++17", f"-I{place}", "-o", str(program), str(source)],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    out = subprocess.run([str(program)], capture_output=True, check=True).stdout
    got = torch.from_numpy(np.frombuffer(out, np.int16).copy()).view(torch.bfloat16).view(65536, 2)
    values = torch.arange(256).to(torch.uint8).view(CODES).float()
    pair = torch.arange(65536)
    want = torch.stack([values[pair % 256], values[pair // 256]], 1)
    assert int(values.isnan().sum()) == 2
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.float().nan_to_num(), want.nan_to_num())
    # signs of zero too
    assert torch.equal(torch.signbit(got.float()) | got.isnan(), torch.signbit(want) | want.isnan())
