"""What one forward pass works on: packed tokens, where each sequence stands, and where its state lives."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anabranch.fusion.plan import EAGER, Moment
from anabranch.ops.segments import Segments


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """T packed tokens of B sequences: first `decodes` sequences of one token each, then whole prefill segments.

    Decode tokens take the recurrent / absorbed forms, prefill segments (also short ones) the chunk / explicit forms.
    Without decodes the last of `segments` may be padding, with slot -1; `prefill` counts it to the sequence before it.
    """

    tokens: torch.Tensor  # int64 [T]
    segments: Segments  # all B sequences
    prefill: Segments  # those behind the decodes, counted from their first token
    decodes: int
    slots: torch.Tensor  # int64 [B] recurrent-state slot; -1 is no slot
    block_table: torch.Tensor  # int64 [B, max pages]
    rows: torch.Tensor  # int64 [T] latent cache row of each token (page * page size + offset); -1 is none
    wanted: torch.Tensor  # int64 [W] tokens whose logits are computed
    moment: Moment = EAGER  # what the choice of a projection path may look at besides T
    counts: tuple[int, ...] | None = None  # T of every attention replica, where there are several


@dataclass(frozen=True, slots=True)
class KdaState:
    """One KDA layer's pools: conv [slots, K-1, 3P] model dtype, state [slots, H, D(value), D(key)] fp32 or bf16."""

    conv: torch.Tensor
    state: torch.Tensor


@dataclass(frozen=True, slots=True)
class LatentPages:
    """One MLA layer's cache: pages [pages + 1, page size, r + rope] model dtype; nobody reads the last page."""

    pages: torch.Tensor


LayerCache = KdaState | LatentPages


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of all parts; one part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
