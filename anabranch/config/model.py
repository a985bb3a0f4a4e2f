"""Architecture of a Kimi hybrid-attention model, as typed values that no longer depend on a config.json spelling."""

from dataclasses import dataclass
from typing import Literal

Architecture = Literal["kimi_linear", "kimi_k3"]
LayerKind = Literal["kda", "mla"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KdaConfig:
    """Kimi Delta Attention geometry (Kimi-Linear model card; arXiv 2510.26692).

    `gate_lower_bound` None means the softplus gate; a number L means the bounded gate L * sigmoid(rate * zeta).
    """

    heads: int
    head_dim: int
    conv_size: int
    gate_lower_bound: float | None
    full_rank_gate: bool

    @property
    def width(self) -> int:
        """Columns of each of q, k, v: heads * head_dim."""
        return self.heads * self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class MlaConfig:
    """Latent attention geometry without positional encoding (NoPE). `q_lora_rank` None means a direct q_proj.

    `norm_eps` belongs to the two latent norms alone: released code and transformers use 1e-6, SGLang and vLLM 1e-5.
    """

    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    output_gate: bool
    norm_eps: float = 1e-6

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Values in one cache row: normed latent, then the shared key."""
        return self.kv_lora_rank + self.rope_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """Routed experts. `latent_size` None means experts work on the hidden width itself."""

    experts: int
    top_k: int
    shared_experts: int
    intermediate_size: int
    groups: int
    top_groups: int
    scoring: Literal["sigmoid", "softmax"]
    renormalize: bool
    scaling: float
    latent_size: int | None
    latent_norm: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationConfig:
    """`silu` (SwiGLU) or `situ` (tanh-capped GLU of Kimi-K3; `linear_beta` None leaves the up part uncapped)."""

    name: Literal["silu", "situ"]
    beta: float = 1.0
    linear_beta: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A whole text model. Layer indices are 0-based here, unlike in config.json.

    `fp8`: official names, without `.weight`, of the modules whose weight the checkpoint stores in block-FP8.
    """

    architecture: Architecture
    hidden_size: int
    vocab_size: int
    layer_kinds: tuple[LayerKind, ...]
    moe_layers: tuple[bool, ...]
    intermediate_size: int
    rms_norm_eps: float
    activation: ActivationConfig
    kda: KdaConfig
    mla: MlaConfig
    moe: MoeConfig | None
    attn_res_block: int | None
    max_context: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    dtype: str
    expert_format: Literal["plain", "mxfp4"]
    fp8: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        return len(self.layer_kinds)

    def layer_count(self, kind: LayerKind) -> int:
        return self.layer_kinds.count(kind)

    @property
    def is_k3(self) -> bool:
        return self.architecture == "kimi_k3"
