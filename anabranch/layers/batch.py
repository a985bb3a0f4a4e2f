"""What one forward pass works on: packed tokens, where each sequence stands, and where its state lives."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anabranch.fusion.plan import EAGER, Moment
from anabranch.ops.kda_prefill.spec import CHUNK
from anabranch.ops.segments import Segments
from anabranch.ops.staging import to_device


@dataclass(frozen=True, kw_only=True, slots=True)
class Saves:
    """Copies of recurrent memory that prompts leave on their way, each after whole chunks of its segment.

    `chunks` and the other two say the same: the delta rule asks after every chunk, the convolution copies rows.
    """

    chunks: torch.Tensor  # int64 [N] the slot that takes the state after each chunk of the prompts; -1 is none
    slots: torch.Tensor  # int64 [S] the slots that take something; -1 is none
    ends: torch.Tensor  # int64 [S] where that is: tokens since the first prompt token of the batch

    @classmethod
    def of(
        cls, lengths: Sequence[int], marks: Sequence[tuple[int, int] | None], device: torch.device | str
    ) -> "Saves | None":
        """From host numbers: for each prompt segment (its tokens so far, slot) or None; None if there is none at all.

        Raises:
            ValueError: a state is wanted where no chunk ends.
        """
        chunks: list[int] = []
        slots, ends, start = [], [], 0
        for length, mark in zip(lengths, marks, strict=True):
            row = [-1] * -(-length // CHUNK)
            if mark is not None:
                count, slot = mark
                if count % CHUNK or not 0 < count <= length:
                    raise ValueError(f"a state after {count} of {length} tokens: need a positive multiple of {CHUNK}")
                row[count // CHUNK - 1] = slot
                slots.append(slot)
                ends.append(start + count)
            chunks += row
            start += length
        if not slots:
            return None
        return cls(chunks=to_device(chunks, device), slots=to_device(slots, device), ends=to_device(ends, device))


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """T packed tokens of B sequences: first `decodes` sequences of one token each, then whole prefill segments.

    Decode tokens take the recurrent / absorbed forms, prefill segments (also short ones) the chunk / explicit forms.
    Without decodes the last of `segments` may be padding, with slot -1; `prefill` counts it to the sequence before it.
    With `sees`, latent attention takes all tokens for decode tokens (see `single`), and recurrent layers the segments.
    """

    tokens: torch.Tensor  # int64 [T]
    segments: Segments  # all B sequences
    prefill: Segments  # those behind the decodes, counted from their first token
    decodes: int
    slots: torch.Tensor  # int64 [B] recurrent-state slot; -1 is no slot
    block_table: torch.Tensor  # int64 [B, max pages]; with `sees` [T, max pages]
    rows: torch.Tensor  # int64 [T] latent cache row of each token (page * page size + offset); -1 is none
    wanted: torch.Tensor | None  # int64 [W] tokens whose logits are computed; None: every token's
    moment: Moment = EAGER  # what the choice of a projection path may look at besides T
    counts: tuple[int, ...] | None = None  # T of every attention replica, where there are several
    saves: Saves | None = None  # what the prompts leave on their way
    sees: torch.Tensor | None = None  # int64 [T] tokens in the cache that each token attends to; 0 is padding

    @property
    def single(self) -> tuple[int, torch.Tensor]:
        """How many leading tokens latent attention takes one by one, and int64 [at least so many] what each sees."""
        return (self.decodes, self.segments.ends) if self.sees is None else (len(self.sees), self.sees)


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
