"""Programmatic dependent launch of Triton kernels: a kernel may start while the one before it still runs.

A kernel that is launched early calls `ahead` first, so that the kernel behind it may start in turn. Then it reads what
no kernel of its stream writes (weights), what was complete before the last plain launch (ops/kda_step/spec.py) or,
behind a kernel that waited before it let this one in (`follow`), what the last but one wrote. It calls `behind` before
anything else. Every program calls `behind`: when a kernel has ended, so have all before it. The first norm of a pass
has no update to add and is launched plainly: all earlier passes are complete behind it.
"""

from functools import cache
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def hopper() -> bool:
    """Whether the device, or the one compiled for, knows the instructions."""
    if knobs.runtime.interpret:
        return False
    target: Any = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= 90


def early_launch(wanted: bool = True) -> dict[str, bool]:
    """Launch options of a kernel with an EARLY constant; one that is not `wanted` early still lets others start."""
    return {"EARLY": True, "launch_pdl": wanted} if hopper() else {"EARLY": False}


@triton.jit
def ahead(EARLY: tl.constexpr):
    """The kernel behind this one may start."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def behind(EARLY: tl.constexpr):
    """Wait until every kernel before this one has ended and its writes can be seen."""
    if EARLY:
        gdc_wait()


@triton.jit
def follow(EARLY: tl.constexpr):
    """Wait, then let the next kernel start: what the last but one wrote may be read even before the wait."""
    behind(EARLY)
    ahead(EARLY)


@triton.jit
def prefetch_l2(rows, BYTES: tl.constexpr):
    """Fetch BYTES from each of these addresses, both multiples of 16, into the second-level cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [rows.to(tl.int64, bitcast=True), tl.full(rows.shape, BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
