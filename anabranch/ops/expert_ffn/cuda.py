"""The experts of one FFN: streamed by CUDA C++ for few tokens, by Triton tiles above. See spec.py for shapes."""

from collections.abc import Callable

import torch

from anabranch.config.model import ActivationConfig
from anabranch.ops.expert_ffn import stream, triton
from anabranch.ops.expert_ffn.plan import StreamPlan, choose_stream
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
    plan: StreamPlan | None = None,
) -> torch.Tensor:
    """routed + shared, or routed | shared.

    Raises:
        ValueError: a `plan` was asked for and the kernels were not made for these inputs.
    """
    if plan is None and latent is None and stream.refusal(x, experts, bank, shared) is None:
        plan = choose_stream(len(x))
    if plan is None:
        return triton.expert_ffn(x, weights, experts, bank, activation, shared, linear, latent)
    if latent is not None:
        raise ValueError("expert_ffn: a plan to stream was given for latent experts; accepted: experts of the width")
    return stream.expert_ffn(x, weights, experts, bank, activation, shared, plan)
