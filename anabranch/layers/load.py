"""How many tokens each routed expert was given: counted where they are routed, read when someone asks."""

import torch

from anabranch.layers.batch import Batch
from anabranch.layers.build import Build


class ExpertLoad:
    """Counts of one MoE layer over the tokens of this rank's attention replica.

    Of the ranks that route the same rows the first one counts, so that sums over ranks count each token once.
    """

    def __init__(self, build: Build) -> None:
        assert build.config.moe is not None
        self.experts, self.place = build.config.moe.experts, build.parallel
        # one more, for rows of no token
        self.counts = torch.zeros(self.experts + 1, dtype=torch.int64, device=build.device)

    def note(self, experts: torch.Tensor, batch: Batch) -> None:
        """Add the choices [rows, k] of own tokens, alone or among those of all replicas; may be captured."""
        if self.place.attn_tp_rank:
            return
        everyone = batch.counts is not None and len(experts) > len(batch.rows)
        first = sum(batch.counts[: self.place.dp_rank]) if batch.counts and everyone else 0
        own = experts[first : first + len(batch.rows)]
        kept = torch.where(batch.rows[:, None] >= 0, own, self.experts).flatten()
        self.counts.index_add_(0, kept, torch.ones_like(kept))

    def read(self) -> list[int]:
        """Tokens of each expert since the start; waits for the device."""
        return self.counts[:-1].tolist()
