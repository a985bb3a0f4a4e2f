"""The CUDA decode step compiled for an H200: every variant fits the CTAs an SM is meant to hold, and none spills."""

import re

from helpers.kda_inputs import kinds

from anabranch.ops import native
from anabranch.ops.kda_step import cuda

SHARED_OF_AN_SM, SHARED_OF_A_CTA = 233_472, 1024  # bytes; the second is taken by the system
SMEM = 2944  # bytes of struct Smem, without the state's tile
SPILLS = {"f32_s1_t512x2_tma2_fb": 32, "f32_s1_t512x2_reg_ef": 40}  # bytes at 64 registers; measured all the same


def template(name: str) -> str:
    """The mangled template arguments of a variant: state, SPLIT, threads, resident."""
    state, split, threads, resident = re.match(r"(\w+?)_s(\d)_t(\d+)x(\d)", name).groups()
    return f"Variant{'If' if state == 'f32' else 'It'}Li{split}ELi{threads}ELi{resident}E"


def test_no_variant_spills_and_all_fit(assembled):
    _, kernels = assembled("kda_step")
    source = (native.OPS / "kda_step/csrc/kda_step.cu").read_text()
    names = re.findall(r'\{"(\w+)", launch<', source)
    assert len(kernels) == len(names) > 15
    assert {plan.variant for plans in cuda._PLANS.values() for _, plan in plans} <= set(names)
    allowed = sum(SPILLS.values())
    assert sum(kernel.spilled for kernel in kernels) <= allowed, kernels
    for name in names:
        threads, resident = (int(n) for n in re.search(r"_t(\d+)x(\d)", name).groups())
        split = int(re.search(r"_s(\d)", name).group(1))
        rows = [k for k in kernels if template(name) in k.name]
        assert rows, name
        for _, registers, spilled in rows:
            assert registers * threads * resident <= 65536, (name, registers)
            assert not spilled or threads == 512, (name, spilled)
        size = 2 if kinds(name)["state_dtype"].itemsize == 2 else 4
        tile = 0 if "_reg" in name else 128 * 128 // split * size
        assert (SMEM + tile + SHARED_OF_A_CTA) * resident <= SHARED_OF_AN_SM, name
