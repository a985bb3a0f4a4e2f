"""q, k, v and beta of a prompt made dense: one packing launch against four ordinary copies.

The shape of Kimi-K3's prefill, [1, T, heads, 128] slices of a token-major convolution.
"""

from collections.abc import Iterator, Sequence

import torch

from anabranch.measure.arms import ArmTimes, Least, held_to, sets_for, time_arms
from anabranch.ops.pack import reference, triton
from anabranch.ops.pack.spec import PACK, floor

D, CALLS = 128, 4


def bench_pack(device: torch.device, cases: Sequence[tuple[int, ...]]) -> Iterator[ArmTimes]:
    """Cases of (heads, tokens).

    Raises:
        GateRedError: packed bits differ from the inputs'.
    """
    for heads, tokens in cases:
        yield _case(device, heads, tokens)


def projections(device: torch.device, heads: int, tokens: int) -> tuple[torch.Tensor, ...]:
    """Strided q, k, v and beta."""
    width = heads * D
    mixed = torch.randn(1, tokens, 3 * width, device=device).bfloat16()
    beta = torch.randn(1, tokens, D + heads + -heads % 16, device=device).bfloat16()[..., D : D + heads]
    return (*(part.unflatten(-1, (heads, D)) for part in mixed.split(width, -1)), beta)


def _case(device: torch.device, heads: int, tokens: int) -> ArmTimes:
    first = projections(device, heads, tokens)
    least = floor(first)
    # half of the bytes of a floor are written
    sets = [first, *(projections(device, heads, tokens) for _ in range(sets_for(least.bytes // 2) - 1))]
    with held_to(f"pack, {heads} heads, {tokens} tokens"):
        for got, want in zip(triton.pack(first), first, strict=True):
            PACK.equality.check(got, want)
    arms = {"pack": triton.pack, "four copies": reference.pack}
    return time_arms(
        "pack",
        {"heads": heads, "tokens": tokens, "dtype": "bfloat16"},
        arms,
        sets,
        device,
        least=dict.fromkeys(arms, Least.of(least)),
        equality=PACK.equality.kind,
        calls=CALLS,
    )
