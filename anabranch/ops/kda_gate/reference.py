"""The decay gate in plain PyTorch. See spec.py for shapes."""

import torch

from anabranch.ops.arithmetic import sigmoid, softplus


def log_decay(
    forget: torch.Tensor, dt_bias: torch.Tensor, a_log: torch.Tensor, lower_bound: float | None
) -> torch.Tensor:
    """-rate * softplus(zeta), or lower_bound * sigmoid(rate * zeta); zeta = forget + dt_bias, rate = exp(a_log)."""
    heads, dim = forget.shape[-2:]
    zeta = forget.float() + dt_bias.view(heads, dim)
    rate = a_log.exp().view(heads, 1)
    if lower_bound is None:
        return -rate * softplus(zeta)
    return lower_bound * sigmoid(rate * zeta)
