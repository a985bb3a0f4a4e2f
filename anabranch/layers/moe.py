"""The mixture-of-experts FFN: router, routed experts (plain or MXFP4, latent or not), shared experts."""

import torch
from torch import nn

from anabranch.config.model import ModelConfig
from anabranch.config.parallel import ParallelConfig
from anabranch.layers.experts import Mxfp4Experts, PlainExperts
from anabranch.layers.linear import Linear, RMSNorm, frozen
from anabranch.layers.mlp import Mlp
from anabranch.ops.experts.reference import routed_experts
from anabranch.ops.router.reference import route
from anabranch.parallel.collectives import Collectives


class Router(nn.Module):
    """Router weight [E, hidden] in the model dtype and correction bias [E] in fp32."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__()
        assert config.moe is not None
        self.moe = config.moe
        self.weight = frozen(config.moe.experts, config.hidden_size, dtype=dtype, device=device)
        self.e_score_correction_bias = frozen(config.moe.experts, dtype=torch.float32, device=device)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return route(x, self.weight, self.e_score_correction_bias, self.moe)


class MoeFfn(nn.Module):
    """Routed plus shared experts, complete over the tp group (model_spec section 6.3)."""

    def __init__(
        self,
        config: ModelConfig,
        parallel: ParallelConfig,
        comm: Collectives,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        assert config.moe is not None
        moe, hidden = config.moe, config.hidden_size
        self.moe, self.activation, self.comm = moe, config.activation, comm
        self.gate = Router(config, dtype, device)
        bank = Mxfp4Experts if config.expert_format == "mxfp4" else PlainExperts
        self.experts = bank(config, parallel, dtype, device)
        if moe.shared_experts:
            inner = moe.intermediate_size * moe.shared_experts
            self.shared_experts = Mlp(config, inner, parallel, dtype, device)
        if moe.latent_size:
            self.routed_expert_down_proj = Linear(hidden, moe.latent_size, dtype, device)
            self.routed_expert_up_proj = Linear(moe.latent_size, hidden, dtype, device)
            if moe.latent_norm:
                self.routed_expert_norm = RMSNorm(moe.latent_size, config.rms_norm_eps, dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, experts = self.gate(x)  # routing reads the full width, also for latent experts
        z = self.routed_expert_down_proj(x) if self.moe.latent_size else x
        routed = routed_experts(z, weights, experts, self.experts, self.activation).to(x.dtype)
        shared = self.shared_experts(x) if self.moe.shared_experts else torch.zeros_like(x)
        if not self.moe.latent_size:
            return self.comm.all_reduce(routed + shared, "tp")
        # the latent sum must be complete before its norm, so one collective carries both partial sums
        both = self.comm.all_reduce(torch.cat([routed, shared], -1), "tp")
        routed, shared = both.split([self.moe.latent_size, x.shape[-1]], -1)
        if self.moe.latent_norm:
            routed = self.routed_expert_norm(routed)
        return self.routed_expert_up_proj(routed) + shared
