"""From a checkpoint name to its place in one rank's model: spellings, shard rules, and the copy into the live view."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from anabranch.config.model import ModelConfig
from anabranch.config.parallel import ParallelConfig
from anabranch.layers.linear import share
from anabranch.models.inventory import TensorSpec
from anabranch.ops.fp8_linear.reference import CODES

NAN_SCALE = 255  # the one E8M0 byte that is no power of two


class _Stored(Protocol):
    def __getitem__(self, index: tuple[slice, ...], /) -> torch.Tensor: ...


class Sliceable(_Stored, Protocol):
    """A tensor, or one on disk of which only the slice asked for is read."""

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Rule:
    """Dimension `dim` is divided over the ranks of `group`; without a group every rank holds all of it.

    `padded`: an uneven division is made even by zero rows at the end. Whole experts are divided over ep before this.
    """

    group: Literal["attn_tp", "tp", "moe_tp"] | None = None
    dim: int = 0
    padded: bool = False


_HEADS, _HEAD_COLUMNS = Rule("attn_tp", 0), Rule("attn_tp", 1)
_INNER, _INNER_COLUMNS = Rule("tp", 0), Rule("tp", 1)
_EXPERT, _EXPERT_COLUMNS = Rule("moe_tp", 0), Rule("moe_tp", 1)
_VOCAB = Rule("attn_tp", 0, padded=True)
_WHOLE = Rule()

RULES: dict[str, Rule] = {
    "embed_tokens": _VOCAB,
    "lm_head": _VOCAB,
    # KDA; q, k and v are divided one by one, so each rank's heads belong together
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d", "v_conv1d"), _HEADS),
    **dict.fromkeys(("f_b_proj", "g_b_proj", "g_proj", "b_proj", "dt_bias", "A_log"), _HEADS),
    **dict.fromkeys(("f_a_proj", "g_a_proj", "o_norm"), _WHOLE),
    # MLA (q_proj and g_proj as above); every rank caches the same latent
    **dict.fromkeys(("q_b_proj", "kv_b_proj"), _HEADS),
    **dict.fromkeys(("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"), _WHOLE),
    "o_proj": _HEAD_COLUMNS,
    # dense MLP and shared experts
    **dict.fromkeys(("gate_proj", "up_proj"), _INNER),
    "down_proj": _INNER_COLUMNS,
    # routed experts, plain and packed
    **dict.fromkeys(("w1", "w3"), _EXPERT),
    "w2": _EXPERT_COLUMNS,
    **dict.fromkeys(("gate", "e_score_correction_bias"), _WHOLE),
    **dict.fromkeys(("routed_expert_down_proj", "routed_expert_up_proj", "routed_expert_norm"), _WHOLE),
    # norms and block residuals
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm", "norm"), _WHOLE),
    **dict.fromkeys(("self_attention_res_norm", "self_attention_res_proj", "mlp_res_norm", "mlp_res_proj"), _WHOLE),
    **dict.fromkeys(("output_attn_res_norm", "output_attn_res_proj"), _WHOLE),
}


def leaf_of(name: str) -> str:
    """The module that a tensor belongs to, or the tensor's own name when it is not a `weight`."""
    *_, module, tensor = name.split(".")
    return module if tensor.startswith("weight") else tensor


def rank_of(rule: Rule, parallel: ParallelConfig) -> tuple[int, int]:
    """(rank, size) of the group that `rule` divides over; (0, 1) where every rank holds all."""
    if rule.group is None:
        return 0, 1
    return getattr(parallel, f"{rule.group}_rank"), getattr(parallel, f"{rule.group}_size")


def shard(full: Sliceable, rule: Rule, rank: int, size: int) -> torch.Tensor:
    """The part of `full` that `rank` of `size` holds, without padding: the last ranks of a padded rule hold less.

    ValueError: the dimension is not divisible and the rule does not pad.
    """
    index = [slice(None)] * len(full.shape)
    if rule.group is not None:
        total = full.shape[rule.dim]
        local = -(-total // size) if rule.padded else share(total, size, f"dimension {rule.dim} of a weight")
        index[rule.dim] = slice(min(rank * local, total), min((rank + 1) * local, total))
    return full[tuple(index)]


def copy_shard(
    view: torch.Tensor, full: Sliceable, name: str, config: ModelConfig, parallel: ParallelConfig
) -> torch.Tensor:
    """Fill `view`, the live parameter called `name`, from the unsharded tensor; returns the rows that are not padding.

    The destination's dtype wins: what is fp32 in the model ends in fp32 whatever the checkpoint stores.
    """
    leaf = leaf_of(name)
    if leaf == "A_log":
        # stored [1, 1, H, 1], [H] or longer: what follows the heads is padding and must go before the division
        full = full[(slice(None),) * len(full.shape)].flatten()[: config.kda.heads]
    rule = RULES[leaf]
    part = shard(full, rule, *rank_of(rule, parallel))
    filled = view[: part.shape[0]]
    # copy_ would broadcast
    assert part.shape == filled.shape, name
    assert rule.padded or filled.shape == view.shape, name
    with torch.no_grad():
        filled.copy_(part)
        view[part.shape[0] :].zero_()
    return filled


def span(name: str, values: torch.Tensor) -> torch.Tensor:
    """An fp64 scalar on the tensor's device that is finite exactly if every value is a number, codes included."""
    if values.numel() == 0 or name.endswith(".weight_packed"):  # every pair of E2M1 codes is one
        return torch.zeros((), dtype=torch.float64, device=values.device)
    if values.dtype == torch.uint8:
        return torch.where(values.max() == NAN_SCALE, torch.inf, 0.0).double()
    if values.dtype == CODES:
        # the two NaN codes of E4M3 are the largest bytes with and without their sign
        bad = (values.view(torch.int8).max() == 127) | (values.view(torch.uint8).max() == 255)
        return torch.where(bad, torch.inf, 0.0).double()
    low, high = torch.aminmax(values)
    return high.double() - low.double()


class Part(NamedTuple):
    """Where an official tensor lies in a stored one: `rows` rows (None: all) from `first_row`, in a stack of experts
    those of `expert`."""

    name: str
    expert: int | None = None
    first_row: int = 0
    rows: int | None = None


class StoredPart:
    """A `Part` as a tensor of its own; slicing it reads from the stored tensor only what the slice covers."""

    def __init__(self, stored: _Stored, stored_shape: tuple[int, ...], part: Part) -> None:
        rows, *columns = stored_shape if part.expert is None else stored_shape[1:]
        self.shape = (part.rows or rows, *columns)
        self._stored, self._part = stored, part

    def __getitem__(self, index: tuple[slice, ...], /) -> torch.Tensor:
        start, stop, _ = index[0].indices(self.shape[0])
        first, expert = self._part.first_row, self._part.expert
        index = (slice(first + start, first + stop), *index[1:])
        return self._stored[index] if expert is None else self._stored[(slice(expert, expert + 1), *index)][0]


_LAYER = re.compile(r"model\.layers\.(\d+)\.(?:(mlp|block_sparse_moe)\.)?(.*)")


def locate(name: str, config: ModelConfig) -> list[Part] | Literal["vision", "ignored"]:
    """What the stored tensor `name` holds, as official names, in any of the spellings in use.

    Accepted: `language_model.` before or instead of `model.`, either name of the FFN in any layer, and transformers'
    in-memory names (`forget_gate.`, merged `conv1d`, stacked `experts.gate_up_proj` and `experts.down_proj`). A name
    that no official tensor has comes back as it is: whoever asks knows the official names.
    """
    if config.is_k3 and name.startswith(("vision_tower.", "mm_projector.")):
        return "vision"
    plain = name.removeprefix("language_model.")
    if not plain.startswith(("model.", "lm_head.")):
        plain = f"model.{plain}"
    if "rotary_emb." in plain:
        return "ignored"
    found = _LAYER.fullmatch(plain)
    if not found:
        return [Part(plain)]
    index, ffn, rest = int(found[1]), found[2], found[3]
    if index >= config.layers:
        return "ignored"
    prefix = f"model.layers.{index}."
    if ffn:
        prefix += "block_sparse_moe." if config.moe_layers[index] else "mlp."
        return _stacked(prefix, rest, config) or [Part(prefix + rest)]
    rest = rest.replace("self_attn.forget_gate.", "self_attn.", 1)
    if rest == "self_attn.conv1d.weight":
        width = config.kda.width
        return [Part(f"{prefix}self_attn.{n}_conv1d.weight", None, i * width, width) for i, n in enumerate("qkv")]
    return [Part(prefix + rest)]


def _stacked(prefix: str, rest: str, config: ModelConfig) -> list[Part]:
    """Parts of the two expert stacks; none for any other name."""
    if config.moe is None or rest not in ("experts.gate_up_proj", "experts.down_proj"):
        return []
    down, inner = rest == "experts.down_proj", config.moe.intermediate_size
    spans = [("w2", 0, None)] if down else [("w1", 0, inner), ("w3", inner, inner)]
    return [
        Part(f"{prefix}experts.{e}.{part}.weight", e, first, rows)
        for e in range(config.moe.experts)
        for part, first, rows in spans
    ]


def stored_shape(parts: list[Part], tensors: Mapping[str, TensorSpec]) -> tuple[int, ...]:
    """Shape that the stored tensor made of `parts` must have."""
    rows = sum(tensors[part.name].shape[0] for part in parts if part.expert in (None, 0))
    shape = (rows, *tensors[parts[0].name].shape[1:])
    stacked = len({part.expert for part in parts} - {None})
    return (stacked, *shape) if stacked else shape
