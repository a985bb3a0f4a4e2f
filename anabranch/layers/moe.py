"""The mixture-of-experts FFN: router, routed experts (plain or MXFP4, latent or not), shared experts."""

import torch
from torch import nn

from anabranch.layers.build import Build
from anabranch.layers.experts import Mxfp4Experts, PlainExperts
from anabranch.layers.linear import Linear, RMSNorm, frozen
from anabranch.layers.mlp import Mlp


class Router(nn.Module):
    """Router weight [E, hidden] in the model dtype and correction bias [E] in fp32."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        assert build.config.moe is not None
        self.moe, self.ops = build.config.moe, build.ops
        self.weight = frozen(self.moe.experts, build.config.hidden_size, dtype=build.dtype, device=build.device)
        self.e_score_correction_bias = frozen(self.moe.experts, dtype=torch.float32, device=build.device)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ops.route(x, self.weight, self.e_score_correction_bias, self.moe)


class MoeFfn(nn.Module):
    """Routed plus shared experts, complete over the tp group (model_spec section 6.3)."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        assert build.config.moe is not None
        moe, hidden = build.config.moe, build.config.hidden_size
        self.moe, self.activation, self.ops, self.comm = moe, build.config.activation, build.ops, build.comm
        self.gate = Router(build)
        self.experts = (Mxfp4Experts if build.config.expert_format == "mxfp4" else PlainExperts)(build)
        if moe.shared_experts:
            self.shared_experts = Mlp(build, moe.intermediate_size * moe.shared_experts)
        if moe.latent_size:
            self.routed_expert_down_proj = Linear(build, hidden, moe.latent_size)
            self.routed_expert_up_proj = Linear(build, moe.latent_size, hidden)
            if moe.latent_norm:
                self.routed_expert_norm = RMSNorm(build, moe.latent_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, experts = self.gate(x)  # routing reads the full width, also for latent experts
        z = self.routed_expert_down_proj(x) if self.moe.latent_size else x
        routed = self.ops.routed_experts(z, weights, experts, self.experts, self.activation).to(x.dtype)
        shared = self.shared_experts(x) if self.moe.shared_experts else torch.zeros_like(x)
        if not self.moe.latent_size:
            return self.comm.all_reduce(routed + shared, "tp")
        # the latent sum must be complete before its norm, so one collective carries both partial sums
        both = self.comm.all_reduce(torch.cat([routed, shared], -1), "tp")
        routed, shared = both.split([self.moe.latent_size, x.shape[-1]], -1)
        if self.moe.latent_norm:
            routed = self.routed_expert_norm(routed)
        return self.routed_expert_up_proj(routed) + shared
