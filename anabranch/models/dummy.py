"""Random weights in place of a checkpoint, for measuring speed and memory: plausible magnitudes, meaningless text."""

import hashlib
import math

import torch

from anabranch.config.model import ModelConfig
from anabranch.models.kimi import KimiForCausalLM
from anabranch.models.weights import RULES, copy_shard, leaf_of, rank_of
from anabranch.ops.fp8_linear.reference import BLOCK, CODES

_STD = 0.02
# E2M1 codes drawn evenly have an RMS of 2.93; these two scales, 2^-8 and 2^-7, bring it to 0.018
_SCALES = (119, 120)
_CODE_STD = 64.0  # of block-FP8 codes, so that their scale is a constant


def load_dummy(model: KimiForCausalLM, seed: int = 0) -> None:
    """Fill every parameter of `model` in place, on its device.

    Each tensor has a stream of its own (seed and name), so a model's weights do not depend on the order or on which
    other tensors exist, nor on the layout: a rank that holds a part of a tensor draws all of it, into a temporary, and
    keeps its part. Kinds of devices differ in their random numbers. Padding rows stay zero.
    """
    config, parallel = model.config, model.parallel
    for name, view in model.state_dict().items():
        rule = RULES[leaf_of(name)]
        _, size = rank_of(rule, parallel)
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
        generator = torch.Generator(view.device).manual_seed(int.from_bytes(digest))
        with torch.no_grad():
            if size == 1:
                _fill(view, name, config, generator)
                continue
            shape = list(view.shape)
            shape[rule.dim] = config.vocab_size if rule.padded else shape[rule.dim] * size
            full = torch.empty(shape, dtype=view.dtype, device=view.device)
            _fill(full, name, config, generator)
            copy_shard(view, full, name, config, parallel)


def _fill(view: torch.Tensor, name: str, config: ModelConfig, generator: torch.Generator) -> None:
    leaf = leaf_of(name)
    if name.endswith(".weight_packed"):
        view.random_(0, 256, generator=generator)
    elif name.endswith(".weight_scale_inv"):
        view.fill_(_STD / _CODE_STD)
    elif view.dtype == CODES:
        for rows in view.split(BLOCK):
            rows.copy_(torch.empty(rows.shape, device=view.device).normal_(0, _CODE_STD, generator=generator))
    elif name.endswith(".weight_scale"):
        view.random_(_SCALES[0], _SCALES[-1] + 1, generator=generator)
    elif leaf.endswith("norm"):
        view.fill_(1)
    elif leaf == "e_score_correction_bias":
        view.zero_()
    elif leaf == "A_log":
        view.uniform_(1, 16, generator=generator).log_()
    elif leaf == "dt_bias":
        _fill_dt_bias(view, config.kda.gate_lower_bound is None, generator)
    elif leaf.endswith("conv1d"):
        view.normal_(0, 0.5 / math.sqrt(view.shape[-1]), generator=generator)
    else:
        view.normal_(0, 1 if leaf == "embed_tokens" else _STD, generator=generator)


def _fill_dt_bias(view: torch.Tensor, softplus: bool, generator: torch.Generator) -> None:
    if softplus:
        # the inverse softplus of steps drawn evenly on a log scale from 1e-3 to 1e-1
        view.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_().expm1_().log_()
    else:
        view.normal_(0, 0.5, generator=generator)
