"""The experts of one FFN as the chain of their references. See spec.py for shapes."""

from collections.abc import Callable

import torch

from anabranch.config.model import ActivationConfig
from anabranch.ops.experts.reference import ExpertBank, routed_experts
from anabranch.ops.glu.reference import glu


def expert_ffn(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    bank: ExpertBank,
    activation: ActivationConfig,
    shared: tuple[torch.Tensor, torch.Tensor] | None,
    linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    latent: torch.Tensor | None = None,
) -> torch.Tensor:
    """routed + shared, or routed | shared."""
    z = x if latent is None else latent
    routed = routed_experts(z, weights, experts, bank, activation, linear).to(x.dtype)
    own = torch.zeros_like(x) if shared is None else linear(glu(linear(x, shared[0]), activation), shared[1])
    if latent is not None:
        return torch.cat([routed, own], -1)
    return routed + own
