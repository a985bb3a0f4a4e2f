"""Layout arithmetic: from the user's tp, dp-attention, ep and pp to the groups that each rank belongs to."""

from dataclasses import dataclass

from anabranch.config.model import ModelConfig
from anabranch.config.parallel import ParallelConfig

_MXFP4 = ("MXFP4 group", 32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Sizes of one model replica. `dp_attention` replicas of attention share the tp ranks: attn_tp = tp / dp_attention.

    Rank order inside a pipeline stage: rank = dp_rank * attn_tp + attn_tp_rank = ep_rank * moe_tp + moe_tp_rank.
    """

    tp: int = 1
    dp_attention: int = 1
    ep: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "dp_attention", "ep", "pp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: need at least 1")
        for name in ("dp_attention", "ep"):
            if self.tp % getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)} does not divide tp={self.tp}")

    @property
    def attn_tp(self) -> int:
        return self.tp // self.dp_attention

    @property
    def world(self) -> int:
        return self.tp * self.pp

    def rank(self, rank: int) -> ParallelConfig:
        """The place of global rank `rank` (stage-major)."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank={rank}: need 0 <= rank < {self.world}")
        pp_rank, tp_rank = divmod(rank, self.tp)
        return ParallelConfig(
            tp_size=self.tp,
            tp_rank=tp_rank,
            attn_tp_size=self.attn_tp,
            attn_tp_rank=tp_rank % self.attn_tp,
            ep_size=self.ep,
            ep_rank=tp_rank // (self.tp // self.ep),
            pp_size=self.pp,
            pp_rank=pp_rank,
        )

    def groups(self, group: str) -> list[tuple[int, ...]]:
        """Global ranks of every group of a kind, in an order that all ranks agree on.

        "tp": a stage. "attn_tp": one attention replica in a stage. "dp": the ranks of a stage that hold the same heads,
        one of each replica. "pp": the ranks of all stages in the same place.
        """
        stages = [range(s * self.tp, (s + 1) * self.tp) for s in range(self.pp)]
        n = self.attn_tp
        match group:
            case "tp":
                return [tuple(stage) for stage in stages]
            case "attn_tp":
                return [tuple(stage[i : i + n]) for stage in stages for i in range(0, self.tp, n)]
            case "dp":
                return [tuple(stage[i::n]) for stage in stages for i in range(n)]
            case "pp":
                return [tuple(range(i, self.world, self.tp)) for i in range(self.tp)]
        raise ValueError(f"group={group!r}: accepted are tp, attn_tp, dp, pp")

    def replica(self, dp_rank: int) -> list[int]:
        """Global ranks of one attention replica, over all stages."""
        n = self.attn_tp
        return [s * self.tp + dp_rank * n + i for s in range(self.pp) for i in range(n)]

    def sampler(self, dp_rank: int) -> int:
        """The global rank that turns a replica's logits into tokens."""
        return (self.pp - 1) * self.tp + dp_rank * self.attn_tp

    def check(self, config: ModelConfig) -> None:
        """Raise ValueError with the broken rule if `config` cannot be laid out like this."""
        attention, moe_tp = ("attention-TP (tp / dp_attention)", self.attn_tp), self.tp // self.ep
        rules = [("KDA heads (num_heads)", config.kda.heads, *attention)]
        rules += [("MLA heads (num_attention_heads)", config.mla.heads, *attention)]
        if not all(config.moe_layers):
            rules += [("intermediate_size", config.intermediate_size, "tp", self.tp)]
        if moe := config.moe:
            shared, width = moe.intermediate_size * moe.shared_experts, moe.latent_size or config.hidden_size
            rules += [("num_experts", moe.experts, "ep", self.ep)]
            rules += [("moe_intermediate_size", moe.intermediate_size, "tp / ep", moe_tp)]
            rules += [("shared expert width (moe_intermediate_size * num_shared_experts)", shared, "tp", self.tp)]
            if config.expert_format == "mxfp4":
                inner = moe.intermediate_size // moe_tp
                rules += [("expert width", width, *_MXFP4), (f"moe_intermediate_size / {moe_tp}", inner, *_MXFP4)]
        for what, value, group, size in rules:
            if value % size:
                raise ValueError(f"{what}={value} is not divisible by {group}={size}")
        if self.pp > config.layers:
            raise ValueError(f"pp={self.pp}: the model has {config.layers} layers")


def stage_layers(layers: int, pp_size: int, pp_rank: int) -> range:
    """The layers of one pipeline stage: contiguous, the earlier stages one longer where it does not divide."""
    base, extra = divmod(layers, pp_size)
    first = pp_rank * base + min(pp_rank, extra)
    return range(first, first + base + (pp_rank < extra))
