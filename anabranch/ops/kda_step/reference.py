"""The decode step as the chain of reference operations. See spec.py for shapes."""

import torch

from anabranch.ops.arithmetic import sigmoid
from anabranch.ops.conv.reference import conv
from anabranch.ops.kda_decode.reference import kda_decode
from anabranch.ops.kda_gate.reference import log_decay
from anabranch.ops.norm.reference import gated_rms_norm, l2_norm
from anabranch.ops.segments import Segments


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
) -> torch.Tensor:
    """One token of every slot, from raw projections to the normed and gated output."""
    heads = state.shape[1:3]
    convolved = conv(qkv, Segments.of([1] * len(slots), device=qkv.device), slots, conv_pool, conv_weight)
    q, k, v = (part.unflatten(-1, heads) for part in convolved.chunk(3, -1))
    g = log_decay(forget.unflatten(-1, heads), dt_bias, a_log, lower_bound)
    o = kda_decode(l2_norm(q), l2_norm(k), v, g, sigmoid(beta_logits.float()), slots, state)
    return gated_rms_norm(o, gate, norm_weight, eps)
