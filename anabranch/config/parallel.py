"""How one model replica is spread over ranks, and which rank this is."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """One rank's place. Sizes are rank counts; `attn_tp_size` may be smaller than `tp_size` under DP attention.

    All attention-side tensors and all per-request state use the attention-TP group; FFN tensors use tp, or ep for
    whole experts. `parallel.layout` computes these from the user's tp, dp-attention, ep and pp.
    """

    tp_size: int = 1
    tp_rank: int = 0
    attn_tp_size: int = 1
    attn_tp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0

    def __post_init__(self) -> None:
        for group in ("tp", "attn_tp", "ep", "pp"):
            size, rank = getattr(self, f"{group}_size"), getattr(self, f"{group}_rank")
            if size < 1 or not 0 <= rank < size:
                raise ValueError(f"{group}_rank={rank} with {group}_size={size}: need size >= 1 and 0 <= rank < size")
        if self.tp_size % self.ep_size:
            raise ValueError(f"ep_size={self.ep_size} does not divide tp_size={self.tp_size}")

    @property
    def moe_tp_size(self) -> int:
        """Ranks that share the inner width of one routed expert."""
        return self.tp_size // self.ep_size

    @property
    def moe_tp_rank(self) -> int:
        return self.tp_rank % self.moe_tp_size

    @property
    def dp_size(self) -> int:
        """Attention replicas that share the tp ranks."""
        return self.tp_size // self.attn_tp_size

    @property
    def dp_rank(self) -> int:
        return self.tp_rank // self.attn_tp_size

    @property
    def samples(self) -> bool:
        """Whether this rank turns its replica's logits into tokens: the first one of the last stage."""
        return self.attn_tp_rank == 0 and self.pp_rank == self.pp_size - 1
