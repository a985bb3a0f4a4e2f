"""May these projections be merged? Pure functions of what is known at load, each answer with its reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anabranch.config.model import LayerKind, ModelConfig
from anabranch.config.verdict import Verdict

KDA_FULL_RANK_GROUPS = {
    "separate": (("q_proj", "k_proj", "v_proj"),),
    "split": (("q_proj", "k_proj", "v_proj", "g_proj"), ("f_a_proj", "b_proj")),
    "whole": (("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj"),),
}
KDA_LOW_RANK_GROUPS = {
    "separate": (("q_proj", "k_proj", "v_proj"),),
    "split": (("q_proj", "k_proj", "v_proj"), ("f_a_proj", "g_a_proj", "b_proj"), ("f_b_proj", "g_b_proj")),
    "whole": (("q_proj", "k_proj", "v_proj", "f_a_proj", "g_a_proj", "b_proj"), ("f_b_proj", "g_b_proj")),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """What a rule may look at: the RESOLVED dtype and quantisation of one projection, never the global config."""

    dtype: str
    quantization: str | None = None
    adapter: bool = False


def merge_verdict(groups: Sequence[Sequence[str]], members: Mapping[str, Projection]) -> Verdict:
    """Whether every group of `groups` can live in one GEMM, given the resolved projections."""
    for group in groups:
        for name in group:
            if members[name].adapter:
                return Verdict(False, f"{name} carries a LoRA adapter, which a merged GEMM would bypass")
            if members[name].quantization is not None:
                return Verdict(False, f"{name} is {members[name].quantization}: merging would lose its scales")
        dtypes = {name: members[name].dtype for name in group}
        if len(set(dtypes.values())) > 1:
            return Verdict(False, f"dtypes differ: {', '.join(f'{n} {d}' for n, d in dtypes.items())}")
    first = members[groups[0][0]].dtype
    return Verdict(True, f"{' + '.join(str(len(group)) for group in groups)} projections in {first}, one buffer")


def path_groups(config: ModelConfig, kind: LayerKind) -> Mapping[str, Sequence[Sequence[str]]]:
    """For each path of a layer kind, the sets of projections that share a GEMM."""
    if kind == "kda":
        return KDA_FULL_RANK_GROUPS if config.kda.full_rank_gate else KDA_LOW_RANK_GROUPS
    qkv_a = ("q_a_proj" if config.mla.q_lora_rank else "q_proj", "kv_a_proj_with_mqa")
    return {"separate": (qkv_a,), "merged": ((*qkv_a, "g_proj"),)}


def verdicts(config: ModelConfig, kind: LayerKind, members: Mapping[str, Projection]) -> dict[str, Verdict]:
    """One verdict for each path of a layer kind. The layout never refuses: shards are merged as they are."""
    groups = path_groups(config, kind)
    if kind == "mla" and not config.mla.output_gate:
        refused = Verdict(False, "this model has no MLA output gate to merge")
        return {"separate": merge_verdict(groups["separate"], members), "merged": refused}
    return {path: merge_verdict(parts, members) for path, parts in groups.items()}


def plain_projections(config: ModelConfig, kind: LayerKind, dtype: str) -> dict[str, Projection]:
    """Every merged projection of a layer kind, plain and in one dtype: how the released checkpoints keep attention."""
    names = {name for parts in path_groups(config, kind).values() for group in parts for name in group}
    return {name: Projection(dtype=dtype) for name in sorted(names)}
