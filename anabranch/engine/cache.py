"""Per-request memory: recurrent-state slots for KDA layers and latent pages for MLA layers, as pools."""

from dataclasses import dataclass

import torch

from anabranch.config.model import ModelConfig
from anabranch.config.parallel import ParallelConfig
from anabranch.layers.batch import KdaState, LatentPages, LayerCache
from anabranch.layers.linear import share
from anabranch.parallel.layout import stage_layers

PAGE = 64  # tokens a page: the chunk length at which a recurrent state may be kept


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheShape:
    """Shapes and bytes of one rank's per-request memory. Counts are layers of this rank's pipeline stage."""

    kda_layers: int
    mla_layers: int
    conv: tuple[int, int]
    state: tuple[int, int, int]
    latent_dim: int
    dtype: torch.dtype
    state_dtype: torch.dtype

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        parallel: ParallelConfig,
        dtype: torch.dtype,
        state_dtype: torch.dtype = torch.float32,
    ) -> "CacheShape":
        """Heads are shared over the attention-TP group; latent rows are replicated over it."""
        kinds = [config.layer_kinds[i] for i in stage_layers(config.layers, parallel.pp_size, parallel.pp_rank)]
        heads, dim = share(config.kda.heads, parallel.attn_tp_size, "KDA heads (num_heads)"), config.kda.head_dim
        return cls(
            kda_layers=kinds.count("kda"),
            mla_layers=kinds.count("mla"),
            conv=(config.kda.conv_size - 1, 3 * heads * dim),
            state=(heads, dim, dim),
            latent_dim=config.mla.latent_dim,
            dtype=dtype,
            state_dtype=state_dtype,
        )

    @property
    def bytes_per_slot(self) -> int:
        """Recurrent memory of one request: S and conv rows of every KDA layer."""
        state = self.state[0] * self.state[1] * self.state[2] * self.state_dtype.itemsize
        return self.kda_layers * (state + self.conv[0] * self.conv[1] * self.dtype.itemsize)

    @property
    def bytes_per_token(self) -> int:
        """Latent rows of one token in every MLA layer."""
        return self.mla_layers * self.latent_dim * self.dtype.itemsize


class Cache:
    """The pools of one rank and the free lists of their slots and pages.

    `layers` holds one KdaState or LatentPages for each layer of the stage, in order.
    """

    def __init__(
        self,
        config: ModelConfig,
        parallel: ParallelConfig,
        shape: CacheShape,
        *,
        slots: int,
        pages: int,
        device: torch.device | str,
    ) -> None:
        self.shape, self.slots, self.pages = shape, slots, pages
        self.layers: list[LayerCache] = []
        for i in stage_layers(config.layers, parallel.pp_size, parallel.pp_rank):
            if config.layer_kinds[i] == "kda":
                conv = torch.zeros(slots, *shape.conv, dtype=shape.dtype, device=device)
                state = torch.zeros(slots, *shape.state, dtype=shape.state_dtype, device=device)
                self.layers.append(KdaState(conv, state))
            else:
                # pages are written before they are read, so they need no initial value
                rows = torch.empty(pages, PAGE, shape.latent_dim, dtype=shape.dtype, device=device)
                self.layers.append(LatentPages(rows))
        self.free_slots = list(range(slots))[::-1]
        self.free_pages = list(range(pages))[::-1]

    @property
    def bytes(self) -> int:
        """Real bytes of all pools."""
        tensors = [t for c in self.layers for t in ((c.conv, c.state) if isinstance(c, KdaState) else (c.pages,))]
        return sum(t.numel() * t.element_size() for t in tensors)

    def take(self, tokens: int) -> tuple[int, list[int]] | None:
        """A zeroed slot and the pages for `tokens` tokens, or None if there is not enough of either."""
        need = pages_for(tokens)
        if not self.free_slots or need > len(self.free_pages):
            return None
        slot = self.free_slots.pop()
        for layer in self.layers:
            if isinstance(layer, KdaState):  # a new sequence starts from zeros; kernels read unconditionally
                layer.conv[slot].zero_()
                layer.state[slot].zero_()
        return slot, [self.free_pages.pop() for _ in range(need)]

    def give_back(self, slot: int, pages: list[int]) -> None:
        """Return what `take` handed out."""
        assert slot not in self.free_slots, f"slot {slot} freed twice"
        self.free_slots.append(slot)
        self.free_pages.extend(pages)


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` latent rows."""
    return -(-tokens // PAGE)
