"""The decode step as the chain of reference operations, token by token. See spec.py for shapes."""

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
    *,
    early: bool = False,
    keep: torch.Tensor | None = None,
    f_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """The tokens of every slot, from raw projections to the normed and gated output; `early` changes nothing here."""
    requests, heads = len(slots), state.shape[1:3]
    tokens = qkv.shape[0] // max(requests, 1)
    if keep is None:
        keep = torch.full((requests, tokens), -1, dtype=torch.int64, device=slots.device)
        keep[:, -1] = slots
    if f_b is not None:
        forget = (forget.float() @ f_b.float().T).to(forget.dtype)
    own = torch.where(slots >= 0, torch.arange(requests, device=slots.device), -1)
    windows, states = conv_pool[slots.clamp_min(0)], state[slots.clamp_min(0)]
    y = torch.empty(qkv.shape[0], heads[0] * heads[1], dtype=qkv.dtype, device=qkv.device)
    for token in range(tokens):
        raw, f, b, z = (t[token::tokens] for t in (qkv, forget, beta_logits, gate))
        convolved = conv(raw, Segments.of([1] * requests, device=qkv.device), own, windows, conv_weight)
        q, k, v = (part.unflatten(-1, heads) for part in convolved.chunk(3, -1))
        g = log_decay(f.unflatten(-1, heads), dt_bias, a_log, lower_bound)
        o = kda_decode(l2_norm(q), l2_norm(k), v, g, sigmoid(b.float()), own, states)
        y[token::tokens] = torch.where(slots[:, None] >= 0, gated_rms_norm(o, z, norm_weight, eps), 0)
        kept = (keep[:, token] >= 0) & (slots >= 0)
        conv_pool[keep[kept, token]], state[keep[kept, token]] = windows[kept], states[kept]
    return y
