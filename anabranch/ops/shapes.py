"""Which models an implementation was made for: the shapes of a config, each with the reason where they do not fit."""

import torch

from anabranch.config.model import ModelConfig
from anabranch.config.verdict import Verdict
from anabranch.ops import native
from anabranch.ops.router.plan import FEW_TOKENS, NORMED_TOKENS, unfit


def _hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def _tile(name: str, value: int) -> Verdict:
    """Triton tiles are powers of two, and matrix instructions start at 16."""
    ok = value >= 16 and value & (value - 1) == 0
    return Verdict(ok, f"{name}={value}" if ok else f"needs {name} to be a power of two from 16, it is {value}")


def kda_heads(config: ModelConfig) -> Verdict:
    return _tile("the KDA head_dim", config.kda.head_dim)


def four_taps(config: ModelConfig) -> Verdict:
    if config.kda.conv_size != 4:
        return Verdict(False, f"needs short_conv_kernel_size=4, it is {config.kda.conv_size}")
    return kda_heads(config)


def heads_of_128(config: ModelConfig) -> Verdict:
    first, dim = four_taps(config), config.kda.head_dim
    return first if not first.ok or dim == 128 else Verdict(False, f"needs the KDA head_dim to be 128, it is {dim}")


def bounded_heads_of_128(config: ModelConfig) -> Verdict:
    first, bound = heads_of_128(config), config.kda.gate_lower_bound
    if first.ok and (bound is None or not -5 <= bound <= 0):
        return Verdict(False, f"needs a gate bounded by -5 to 0 (gate_lower_bound), it is {bound}")
    return first


def latent(config: ModelConfig) -> Verdict:
    first = _tile("kv_lora_rank", config.mla.kv_lora_rank)
    return _tile("qk_rope_head_dim", config.mla.rope_dim) if first.ok else first


def balanced(config: ModelConfig) -> Verdict:
    """The attention of a decode step runs wherever `latent` holds; the reason says by which kernels."""
    first, sizes = latent(config), (config.mla.kv_lora_rank, config.mla.rope_dim)
    if not first.ok or not _hopper() or sizes != (512, 64):
        return first
    found = native.verdict("mla")
    return Verdict(True, "attention in CUDA C++" if found.ok else f"attention in Triton: {found.reason}")


def cudnn_heads(config: ModelConfig) -> Verdict:
    sizes = config.mla.qk_dim, config.mla.v_dim
    if any(size % 64 or size > 256 for size in sizes):
        return Verdict(False, f"needs attention heads of 64, 128, 192 or 256, they are {sizes[0]} and {sizes[1]}")
    version = torch.backends.cudnn.version() if _hopper() and torch.backends.cudnn.is_available() else None
    if not version or version < 91000:
        return Verdict(False, f"needs cuDNN 9.10 on a Hopper GPU, found {version or 'none'}")
    return Verdict(True, f"cuDNN {version}")


def ungrouped(config: ModelConfig) -> Verdict:
    groups = config.moe.groups if config.moe else 1
    return Verdict(
        groups == 1, f"num_expert_group={groups}" if groups == 1 else f"needs one expert group, not {groups}"
    )


def few_routed(config: ModelConfig) -> Verdict:
    why = unfit(config.moe, config.hidden_size) if config.moe else "needs a router"
    return Verdict(False, why) if why else Verdict(True, f"up to {FEW_TOKENS} tokens, triton above")


def few_normed(config: ModelConfig) -> Verdict:
    if config.attn_res_block is not None:
        return Verdict(False, "attention residuals are read through a norm of their own")
    first = few_routed(config)
    return Verdict(True, f"up to {NORMED_TOKENS} tokens, two launches above") if first.ok else first


def plain_experts(config: ModelConfig) -> Verdict:
    moe = config.moe
    if moe is None or config.expert_format == "mxfp4" or moe.latent_size:
        return Verdict(False, "needs plain experts of the hidden width")
    width, inner = config.hidden_size, moe.intermediate_size
    if width % 8 or inner % 8 or width > 7168:
        return Verdict(False, f"needs multiples of 8, hidden_size up to 7168; they are {width} and {inner}")
    return Verdict(True, "one token in products with a vector, more in tiles")


def low_rank(config: ModelConfig) -> Verdict:
    rank, hidden = config.kda.head_dim, config.hidden_size
    if rank != 128 or hidden % 256:
        return Verdict(False, f"needs a KDA head_dim of 128 and hidden_size % 256 = 0, they are {rank} and {hidden}")
    return Verdict(True, f"rank {rank}, hidden_size={hidden}")
