"""May these projections be merged? Pure functions of what is known at load, each answer with its reason."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from anabranch.config.model import LayerKind, ModelConfig
from anabranch.config.parallel import ParallelConfig
from anabranch.config.verdict import Verdict
from anabranch.ops.kda_step.spec import F_B_INSIDE

FP8 = "block-FP8"
FP8_BLOCK = 128  # rows, and columns, under one scale

_QKV = ("q_proj", "k_proj", "v_proj")
KDA_FULL_RANK_GROUPS = {
    "separate": (_QKV,),
    "split": ((*_QKV, "g_proj"), ("f_a_proj", "b_proj")),
    "whole": ((*_QKV, "g_proj", "f_a_proj", "b_proj"),),
    "overlap": ((*_QKV, "g_proj"), ("f_a_proj", "b_proj")),
    "fused": ((*_QKV, "g_proj", "f_a_proj", "b_proj"), ("f_b_proj",)),
    "deferred": ((*_QKV, "g_proj", "f_a_proj", "b_proj"),),
    "single": (),
}
KDA_LOW_RANK_GROUPS = {
    "separate": (_QKV,),
    "split": (_QKV, ("f_a_proj", "g_a_proj", "b_proj"), ("f_b_proj", "g_b_proj")),
    "whole": ((*_QKV, "f_a_proj", "g_a_proj", "b_proj"), ("f_b_proj", "g_b_proj")),
    "overlap": (_QKV, ("f_a_proj", "g_a_proj", "b_proj"), ("f_b_proj", "g_b_proj")),
    "fused": ((*_QKV, "f_a_proj", "g_a_proj", "b_proj"), ("f_b_proj", "g_b_proj")),
    "deferred": (),  # always refused
    "single": (),
}
# beside the gate's two GEMMs these are a few rows, or they are multiplied in a form that needs them plain
_DEQUANTIZED = ("f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj", "kv_b_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """What a rule may look at: the RESOLVED dtype and quantisation of one projection, never the global config.

    `rows` are those of this rank; 0 where nobody needs to know. `note` says why a stored quantisation was given up.
    """

    dtype: str
    quantization: str | None = None
    adapter: bool = False
    rows: int = 0
    note: str = ""


Layer = Mapping[str, Projection]


def merge_verdict(groups: Sequence[Sequence[str]], members: Layer) -> Verdict:
    """Whether every group of `groups` can live in one GEMM, given the resolved projections."""
    for group in groups:
        for name in group:
            if members[name].adapter:
                return Verdict(False, f"{name} carries a LoRA adapter, which a merged GEMM would bypass")
        if not (verdict := _scales_survive(group, members)).ok:
            return verdict
        dtypes = {name: members[name].dtype for name in group}
        if len(set(dtypes.values())) > 1:
            return Verdict(False, f"dtypes differ: {', '.join(f'{n} {d}' for n, d in dtypes.items())}")
    if not groups:
        return Verdict(True, "one GEMM a projection, nothing is merged")
    formats = dict.fromkeys(members[group[0]].quantization or members[group[0]].dtype for group in groups)
    counts = " + ".join(str(len(group)) for group in groups)
    return Verdict(True, f"{counts} projections in {' and '.join(formats)}, one buffer{' each' * (len(formats) > 1)}")


def _scales_survive(group: Sequence[str], members: Layer) -> Verdict:
    """Block-FP8 merges with block-FP8 where every scale block stays in one projection; nothing else quantised does."""
    formats = {name: members[name].quantization for name in group}
    first = next((name for name in group if formats[name] is not None), None)
    if first is None:
        return Verdict(True, "plain")
    if formats[first] != FP8 or set(formats.values()) != {FP8}:
        other = next((name for name in group if formats[name] != formats[first]), first)
        beside = f" and {other} is {formats[other] or members[other].dtype}" if other != first else ""
        return Verdict(False, f"{first} is {formats[first]}{beside}: merging would lose its scales")
    for name in group[:-1]:
        if rest := members[name].rows % FP8_BLOCK:
            return Verdict(False, f"{name} ends {rest} rows into a {FP8_BLOCK}-row scale block: none may start there")
    return Verdict(True, FP8)


def path_groups(config: ModelConfig, kind: LayerKind) -> Mapping[str, Sequence[Sequence[str]]]:
    """For each path of a layer kind, the sets of projections that share a GEMM, in the order of block-FP8 rows."""
    if kind == "kda":
        return KDA_FULL_RANK_GROUPS if config.kda.full_rank_gate else KDA_LOW_RANK_GROUPS
    qkv_a = ("q_a_proj" if config.mla.q_lora_rank else "q_proj", "kv_a_proj_with_mqa")
    return {"separate": (qkv_a,), "merged": (("g_proj", *qkv_a),), "overlap": (qkv_a,), "single": ()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What decodes a KDA layer: the implementation of `kda_step`, None where nobody knows yet, and the mode."""

    name: str | None = None
    deterministic: bool = False

    @property
    def takes_f_b(self) -> Verdict:
        """Whether the decay's second product can be left to it."""
        if self.deterministic:
            return Verdict(False, "deterministic mode decodes by the operations of prompts, which take no f_b")
        needed = f"kda_step={' or '.join(F_B_INSIDE)}"
        if self.name not in (None, *F_B_INSIDE):
            return Verdict(False, f"f_b inside the decode step needs {needed}, here it is {self.name}")
        return Verdict(True, f"f_b inside the decode step ({needed})")


ANY_STEP = Step()


def deferral_verdict(config: ModelConfig, members: Layer, step: Step) -> Verdict:
    """Whether f_b may leave the prologue for the decode step."""
    if not config.kda.full_rank_gate:
        return Verdict(False, "behind a low-rank gate g_b needs a launch of its own, and f_b rides in it")
    f_b = members["f_b_proj"]
    if f_b.adapter:
        return Verdict(False, "f_b_proj carries a LoRA adapter, which the decode step would bypass")
    if f_b.quantization:
        return Verdict(False, f"f_b_proj is {f_b.quantization}: the decode step takes it plain")
    return step.takes_f_b


def verdicts(config: ModelConfig, kind: LayerKind, members: Layer, step: Step = ANY_STEP) -> dict[str, Verdict]:
    """One verdict for each path of a layer kind. The layout never refuses: shards are merged as they are."""
    refused = {}
    if kind == "mla" and not config.mla.output_gate:
        refused["merged"] = Verdict(False, "this model has no MLA output gate to merge")
        refused["overlap"] = Verdict(False, "this model has no MLA output gate to overlap")
    deferral = deferral_verdict(config, members, step) if kind == "kda" else None
    if deferral is not None and not deferral.ok:
        refused["deferred"] = deferral
    groups = path_groups(config, kind).items()
    found = {path: refused.get(path) or merge_verdict(parts, members) for path, parts in groups}
    if deferral is not None and found["deferred"].ok:
        found["deferred"] = Verdict(True, f"{found['deferred'].reason}; {deferral.reason}")
    return found


def verdicts_of_kind(
    config: ModelConfig, kind: LayerKind, layers: Sequence[Layer], step: Step = ANY_STEP
) -> dict[str, Verdict]:
    """One verdict for each path over all layers of a kind: a path must be allowed in every one of them."""
    of_kind = [layer for layer, is_kind in zip(layers, config.layer_kinds, strict=True) if is_kind == kind]
    numbers = [i for i, is_kind in enumerate(config.layer_kinds) if is_kind == kind]
    found: dict[str, Verdict] = {}
    seen: list[Layer] = []
    for number, layer in zip(numbers, of_kind, strict=True):
        if layer in seen:
            continue
        seen.append(layer)
        for path, verdict in verdicts(config, kind, layer, step).items():
            if path not in found or (found[path].ok and not verdict.ok):
                where = "" if all(other == layer for other in of_kind) or verdict.ok else f"layer {number}: "
                found[path] = Verdict(verdict.ok, where + verdict.reason)
    return found or verdicts(config, kind, plain_projections(config, kind, config.dtype), step)


def plain_projections(config: ModelConfig, kind: LayerKind, dtype: str) -> dict[str, Projection]:
    """Every merged projection of a layer kind, plain and in one dtype: how the released checkpoints keep attention."""
    names = {name for parts in path_groups(config, kind).values() for group in parts for name in group}
    return {name: Projection(dtype=dtype) for name in sorted(names)}


def resolve(
    config: ModelConfig, parallel: ParallelConfig, dtype: str, adapted: Collection[str] = ()
) -> tuple[dict[str, Projection], ...]:
    """How every attention projection of every layer will be held by a rank.

    What the checkpoint stores in block-FP8 (`config.fp8`) stays so where this rank's part is made of whole scale
    blocks; otherwise, and where a few rows would only be in the way, it is dequantised at load, with a note that says
    why. `adapted`: official names of the modules that carry a LoRA adapter.
    """
    stored, layers = frozenset(config.fp8), []
    cut = {kind: _cut_sizes(config, kind, parallel.attn_tp_size) for kind in ("kda", "mla")}
    for i, kind in enumerate(config.layer_kinds):
        layer = {}
        for name, (rows, part) in cut[kind].items():
            official = f"model.layers.{i}.self_attn.{name}"
            note = _why_dequantized(name, part) if official in stored else ""
            kept = FP8 if official in stored and not note else None
            adapter = official in adapted
            layer[name] = Projection(dtype=dtype, quantization=kept, adapter=adapter, rows=rows, note=note)
        layers.append(layer)
    return tuple(layers)


def _why_dequantized(name: str, part: int | None) -> str:
    if name in _DEQUANTIZED:
        return "kept plain"
    if part is not None and part % FP8_BLOCK:
        return f"a rank's {part} would start inside a {FP8_BLOCK}-wide scale block"
    return ""


def _cut_sizes(config: ModelConfig, kind: LayerKind, ranks: int) -> dict[str, tuple[int, int | None]]:
    """name -> (a rank's rows, a rank's part of the dimension that is cut over ranks or None where nothing is cut)."""

    def by_heads(total: int) -> tuple[int, int | None]:
        return total // ranks, total // ranks if ranks > 1 else None

    if kind == "kda":
        kda = config.kda
        wide, whole = by_heads(kda.width), (kda.head_dim, None)
        sizes = dict.fromkeys(("q_proj", "k_proj", "v_proj", "f_b_proj"), wide)
        sizes |= {"g_proj": wide} if kda.full_rank_gate else {"g_a_proj": whole, "g_b_proj": wide}
        sizes |= {"f_a_proj": whole, "b_proj": by_heads(kda.heads)}
        return sizes | {"o_proj": (config.hidden_size, wide[1])}
    mla = config.mla
    query, value = by_heads(mla.heads * mla.qk_dim), by_heads(mla.heads * mla.v_dim)
    sizes = {"q_a_proj": (mla.q_lora_rank, None), "q_b_proj": query} if mla.q_lora_rank else {"q_proj": query}
    sizes |= {
        "kv_a_proj_with_mqa": (mla.latent_dim, None),
        "kv_b_proj": by_heads(mla.heads * (mla.nope_dim + mla.v_dim)),
    }
    sizes |= {"g_proj": value} if mla.output_gate else {}
    return sizes | {"o_proj": (config.hidden_size, value[1])}


def dequantized(layers: Sequence[Layer]) -> str:
    """One line on what was stored in block-FP8 and is not held so; empty if nothing was."""
    reasons: dict[str, dict[str, None]] = {}
    for layer in layers:
        for name, projection in layer.items():
            if projection.note:
                reasons.setdefault(projection.note, {})[name] = None
    return "; ".join(f"{', '.join(names)} dequantised at load: {note}" for note, names in reasons.items())
