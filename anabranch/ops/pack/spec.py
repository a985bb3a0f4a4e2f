"""Contract of packing, and what both implementations share: what counts as dense, and what is worth a launch."""

from collections import Counter
from collections.abc import Sequence

import torch

from anabranch.ops.spec import BITWISE, Floor, OpSpec

PACK = OpSpec(
    name="pack",
    inputs={"tensors": "any number of tensors of any shapes, strides and dtypes"},
    outputs={"packed": "as many dense tensors, in order; one that was dense is the same object"},
    constraints=(
        "bits are moved, never values: NaN payloads, infinities, subnormals and signed zeros survive",
        "one launch for two or more strided tensors; fewer take the ordinary copy",
    ),
    equality=BITWISE,
    source="fusion_spec section 2.D",
)

# what really ran: "packed", "copied" and "refused: why" (also copied) count tensors, "launches" counts packs
counts: Counter[str] = Counter()


def strided(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Which tensors need a copy. Strides decide, and only those of dimensions with more than one element count."""
    return [i for i, t in enumerate(tensors) if not t.is_contiguous()]


def floor(tensors: Sequence[torch.Tensor]) -> Floor:
    """Every strided tensor read once and written once."""
    moved = sum(tensors[i].numel() * tensors[i].element_size() for i in strided(tensors))
    return Floor(bytes=2 * moved, flops=0)
