"""Contract of the producer layouts. T packed tokens of B segments, H local heads, D channels, C = 3 * H * D.

Besides rows of q|k|v (ops/conv) a convolution's output has three layouts: dense q, k and v ("grouped"), the same with q
and k at unit length in fp32 ("normed"), and these in the model dtype ("rounded"). The prefill kernel decides.
"""

from typing import Literal

import torch

from anabranch.ops.spec import BITWISE, Equality, Floor, OpSpec, tolerance

Layout = Literal["grouped", "normed", "rounded"]

KDA_INPUTS = OpSpec(
    name="kda_inputs",
    inputs={
        "x": "model dtype [T, C], unit inner stride, any row stride: raw projection rows",
        "segments": "Segments: B segments at the start of the T tokens; rows behind them are padding and may hold NaN",
        "slots": "int64 [B]; -1 is no slot: history neither read nor written, output zero",
        "pool": "model dtype [slots, K-1, C]: the last raw rows, row 0 oldest; updated in place",
        "weight": "fp32 [C, K]; tap K-1 multiplies the current token",
        "beta_logits": "model dtype [T, H], unit inner stride, any row stride",
        "layout": "see above",
    },
    outputs={"q, k": "fp32 or model dtype [T, H, D]", "v": "model dtype [T, H, D]", "beta": "fp32 [T, H], sigmoid"},
    constraints=(
        "the convolution is rounded to the model dtype before the norm, as separate operations round it",
        "padding rows are zero",
        "a slot appears at most once in a batch",
    ),
    equality=tolerance(1e-6, 8e-3),
    source="fusion_spec sections 2.A to 2.C; model_spec sections 4.2, 4.3, 4.5",
)

# v, windows and un-normed q and k are ops/conv's own values; a norm may add its squares in another order
VALUES: Equality = BITWISE


def floor(tokens: int, heads: int, qk_itemsize: int = 2, dim: int = 128, itemsize: int = 2) -> Floor:
    """Projection rows and beta read once; q, k, v and beta written once."""
    width = heads * dim
    row = (3 * width + heads) * itemsize + 2 * width * qk_itemsize + width * itemsize + heads * 4
    return Floor(bytes=tokens * row, flops=tokens * width * 3 * 12)


def width_of(beta_logits: torch.Tensor, x: torch.Tensor) -> tuple[int, int]:
    """(H, D) of these inputs."""
    heads = beta_logits.shape[1]
    return heads, x.shape[1] // (3 * heads)
