"""The decay gate in plain PyTorch. See spec.py for shapes."""

import torch
import torch.nn.functional as F


def log_decay(
    forget: torch.Tensor, dt_bias: torch.Tensor, a_log: torch.Tensor, lower_bound: float | None
) -> torch.Tensor:
    """-rate * softplus(zeta), or lower_bound * sigmoid(rate * zeta); zeta = forget + dt_bias, rate = exp(a_log)."""
    heads, dim = forget.shape[-2:]
    zeta = forget.float() + dt_bias.view(heads, dim)
    rate = a_log.exp().view(heads, 1)
    if lower_bound is None:
        return -rate * F.softplus(zeta, beta=1.0, threshold=20.0)
    return lower_bound * torch.sigmoid(rate * zeta)
