"""Contract of the few-token products. M tokens, N rows of weights, K columns, R = 128 the low rank."""

import torch

from anabranch.ops.linear.spec import floor
from anabranch.ops.spec import OpSpec, tolerance

TOKENS = 128  # the tallest token tile
SEGMENTS = 4  # fixed parts of K, summed as (s0 + s1) + (s2 + s3)
RANK = 128
PROLOGUE_TOKENS = 64  # the tallest tile that leaves registers for the second product

SKINNY_GEMM = OpSpec(
    name="skinny_gemm",
    inputs={"x": "bf16 [M <= 128, K], row pitch a multiple of 8", "w": "bf16 [N, K], row pitch a multiple of 8"},
    outputs={"y": "bf16 [M, N]"},
    constraints=(
        "K a multiple of 256, N of 8, addresses of 16 bytes",
        "bits of an element depend on its row of x, its row of w and K alone: merged = separate, batch-invariant",
        "w must not be written by the kernel launched just before: it is read before that kernel has ended",
    ),
    equality=tolerance(3e-6, 8e-3),
    source="torch.nn.functional.linear",
)

LOW_RANK = OpSpec(
    name="low_rank_product",
    inputs={"x": "bf16 [G, M, 128], unit inner stride", "w": "bf16 [G, N, 128], dense rows"},
    outputs={"y": "bf16 [G, M, N]"},
    constraints=("N even", "w must not be written by the kernel launched just before"),
    equality=SKINNY_GEMM.equality,
    source="torch.bmm",
)

PROLOGUE = OpSpec(
    name="gemm_low_rank",
    inputs={
        "x": "bf16 [M, K]",
        "w": "bf16 [N, K], of which the 128 rows of each side from `low_row0` on feed the second product",
        "w2": "bf16 [sides, N2, 128], N2 a multiple of 16",
        "sync": "int32 [2], zero, owned by one layer",
    },
    outputs={"y": "bf16 [M, N]", "y2": "bf16 [sides, M, N2]: side i is y[:, low_row0 + 128 i ..] w2[i]^T"},
    constraints=("y has the bits of skinny_gemm, y2 those of low_rank_product on the rounded y",),
    equality=SKINNY_GEMM.equality,
    source="model description, section 4 (f = f_b(f_a x))",
)


def ranks(y: torch.Tensor, low_row0: int, w2: torch.Tensor) -> torch.Tensor:
    """The columns of y that the second product reads, a side at a time: [M, N] -> [sides, M, rank], views."""
    sides, _, rank = w2.shape
    return y[:, low_row0 : low_row0 + sides * rank].unflatten(-1, (sides, rank)).transpose(0, 1)


__all__ = ["LOW_RANK", "PROLOGUE", "PROLOGUE_TOKENS", "RANK", "SEGMENTS", "SKINNY_GEMM", "TOKENS", "floor", "ranks"]
