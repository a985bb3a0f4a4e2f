"""The experts of one FFN: CUDA C++ for one token, Triton tiles for more. See spec.py for shapes."""

from collections.abc import Callable

import torch

from anabranch.config.model import ActivationConfig
from anabranch.ops.expert_ffn import gemv, triton
from anabranch.ops.expert_ffn.plan import GemvPlan, choose_gemv
from anabranch.ops.experts.reference import ExpertBank


def expert_ffn(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    bank: ExpertBank,
    activation: ActivationConfig,
    shared: tuple[torch.Tensor, torch.Tensor] | None,
    linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    latent: torch.Tensor | None = None,
    plan: GemvPlan | None = None,
) -> torch.Tensor:
    """routed + shared, or routed | shared.

    Raises:
        ValueError: a `plan` was asked for and the kernels were not made for these inputs.
    """
    if plan is None and len(x) == 1 and latent is None and gemv.refusal(x, experts, bank, shared) is None:
        plan = choose_gemv(bank.down(0).shape[1])
    if plan is None:
        return triton.expert_ffn(x, weights, experts, bank, activation, shared, linear, latent)
    if latent is not None:
        raise ValueError("expert_ffn: a plan of one token was given for latent experts; accepted: experts of the width")
    return gemv.expert_ffn(x, weights, experts, bank, activation, shared, plan)
