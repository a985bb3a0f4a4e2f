"""The delta-rule step in plain PyTorch. See spec.py for shapes; state is V-first: S[value, key]."""

import torch

from anabranch.ops.arithmetic import Total, row_sum


def kda_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    slots: torch.Tensor,
    state: torch.Tensor,
    total: Total = row_sum,
) -> torch.Tensor:
    """S <- S*exp(g); S <- S + beta (v - S k) k^T; o = S q / sqrt(D), per request and head."""
    if -1 in slots.tolist():
        o, live = torch.zeros_like(v), slots >= 0
        o[live] = kda_decode(q[live], k[live], v[live], g[live], beta[live], slots[live], state, total)
        return o
    S = state.index_select(0, slots).float() * g.exp().unsqueeze(-2)
    error = beta.unsqueeze(-1) * (v.float() - total(S * k.unsqueeze(-2)))
    S = S + error.unsqueeze(-1) * k.unsqueeze(-2)
    state.index_copy_(0, slots, S.type_as(state))
    return total(S * (q * q.shape[-1] ** -0.5).unsqueeze(-2)).type_as(v)
