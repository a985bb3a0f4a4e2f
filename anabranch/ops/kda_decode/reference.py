"""The delta-rule step in plain PyTorch. See spec.py for shapes; state is V-first: S[value, key]."""

from collections.abc import Callable

import torch

from anabranch.ops.arithmetic import row_sum


def kda_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    slots: torch.Tensor,
    state: torch.Tensor,
    total: Callable[[torch.Tensor], torch.Tensor] = row_sum,
) -> torch.Tensor:
    """S <- S*exp(g); S <- S + beta (v - S k) k^T; o = S q / sqrt(D), per request and head."""
    live = slots >= 0
    S = torch.where(live[:, None, None, None], state[slots.clamp_min(0)], 0).float()
    S = S * g.exp().unsqueeze(-2)
    error = beta.unsqueeze(-1) * (v.float() - total(S * k.unsqueeze(-2)))
    S = S + error.unsqueeze(-1) * k.unsqueeze(-2)
    o = total(S * (q * q.shape[-1] ** -0.5).unsqueeze(-2))
    state[slots[live]] = S[live].to(state.dtype)
    return torch.where(live[:, None, None], o, 0).to(v.dtype)
