"""The MLA output gate, x * sigmoid(g) with g a slice of the merged projection: one launch against the torch pair.

Inputs are in the cache, as behind the attention that makes them: four sets take turns. The floor is the longer of the
bytes and of one launch.
"""

from collections.abc import Iterator, Sequence

import torch

from anabranch.measure.arms import ArmTimes, Least, held_to, time_arms
from anabranch.ops.gate import reference, triton
from anabranch.ops.gate.spec import GATE
from anabranch.ops.spec import Floor

SETS, CALLS = 4, 100
BEFORE = 1536 + 576  # columns of q_a and kv_a in front of Kimi-K3's gate
HEAD = 128
LAUNCH_US = 1.0  # of a kernel that waits for the one before it, in a graph on an H200


def bench_gate(device: torch.device, cases: Sequence[tuple[int, ...]]) -> Iterator[ArmTimes]:
    """Cases of (heads, tokens).

    Raises:
        GateRedError: the bits differ from the reference's.
    """
    for heads, tokens in cases:
        yield _case(device, heads, tokens)


def _inputs(device: torch.device, width: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(tokens, width, device=device).bfloat16()
    merged = torch.randn(tokens, BEFORE + width, device=device).bfloat16() * 3
    return x, merged[:, BEFORE:]


def _case(device: torch.device, heads: int, tokens: int) -> ArmTimes:
    width = heads * HEAD
    sets = [_inputs(device, width, tokens) for _ in range(SETS)]
    with held_to(f"gate, width {width}, {tokens} tokens"):
        for x, g in sets:
            GATE.equality.check(triton.sigmoid_gate(x, g), reference.sigmoid_gate(x, g))
    moved = Least.of(Floor(bytes=3 * tokens * width * 2, flops=0))
    least = Least(moved.bytes, max(moved.us, LAUNCH_US))
    return time_arms(
        "gate",
        {"heads": heads, "width": width, "tokens": tokens, "row_stride": BEFORE + width, "dtype": "bfloat16"},
        {
            "triton": lambda pair: triton.sigmoid_gate(*pair),
            "torch pair": lambda pair: pair[0] * torch.sigmoid(pair[1]),
        },
        sets,
        device,
        least={"triton": least, "torch pair": least},
        equality=GATE.equality.kind,
        calls=CALLS,
    )
