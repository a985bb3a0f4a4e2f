"""The decode step for a CPU, in as few library calls as it takes. See spec.py for shapes."""

from collections.abc import Sequence

import torch

from anabranch.ops.arithmetic import inverse_length, row_sum, scalar, sigmoid, silu, softplus, unit_rms
from anabranch.ops.kda_step import reference


def kda_step(
    qkv: torch.Tensor,
    conv_pool: torch.Tensor,
    conv_weight: torch.Tensor,
    forget: torch.Tensor,
    beta_logits: torch.Tensor,
    gate: torch.Tensor,
    dt_bias: torch.Tensor,
    a_log: torch.Tensor,
    lower_bound: float | None,
    norm_weight: torch.Tensor,
    eps: float,
    slots: torch.Tensor,
    state: torch.Tensor,
    *,
    early: bool = False,
    keep: torch.Tensor | None = None,
    f_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token of each slot; several, a request without a slot, or an f_b to apply is left to the reference."""
    where, (heads, dim) = slots.tolist(), state.shape[1:3]
    if keep is not None or f_b is not None or len(qkv) != len(where) or -1 in where:
        given = (qkv, conv_pool, conv_weight, forget, beta_logits, gate, dt_bias, a_log, lower_bound, norm_weight, eps)
        return reference.kda_step(*given, slots, state, early=early, keep=keep, f_b=f_b)

    window = torch.cat([_rows(conv_pool, where, slots).type_as(qkv), qkv.unsqueeze(1)], 1)
    _store(conv_pool, where, slots, window[:, 1:])
    mixed = silu((window.float() * conv_weight.T).sum(1), row_sum).type_as(qkv).float().view(-1, 3, heads, dim)
    qk, v = mixed[:, :2], mixed[:, 2]
    q, k = (qk * inverse_length(qk, 1e-6)).unsqueeze(-2).unbind(1)

    zeta, rate = (forget.float() + dt_bias).view(-1, heads, dim), a_log.exp().unsqueeze(-1)
    if lower_bound is None:
        g = -rate * softplus(zeta)
    else:
        g = scalar(lower_bound, zeta.dtype) * sigmoid(rate * zeta, row_sum)
    S = _rows(state, where, slots).float() * g.exp().unsqueeze(-2)
    error = sigmoid(beta_logits.float(), row_sum).unsqueeze(-1) * (v - (S * k).sum(-1))
    S.addcmul_(error.unsqueeze(-1), k)
    _store(state, where, slots, S)
    o = (S * (q * scalar(dim**-0.5, q.dtype))).sum(-1).type_as(qkv).float()
    return (unit_rms(o, eps, row_sum) * norm_weight).flatten(1).mul_(sigmoid(gate.float(), row_sum)).type_as(qkv)


def _rows(pool: torch.Tensor, where: Sequence[int], slots: torch.Tensor) -> torch.Tensor:
    """The pool's rows at `slots`, a view if there is one slot."""
    return pool[where[0] : where[0] + 1] if len(where) == 1 else pool.index_select(0, slots)


def _store(pool: torch.Tensor, where: Sequence[int], slots: torch.Tensor, rows: torch.Tensor) -> None:
    """The pool's rows at `slots` <- rows."""
    if len(where) == 1:
        pool[where[0]].copy_(rows[0])
    else:
        pool.index_copy_(0, slots, rows.type_as(pool))
