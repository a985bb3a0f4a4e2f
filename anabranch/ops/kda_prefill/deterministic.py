"""The token form over whole segments: the decode step repeated, so a token's bits do not know how it was scheduled."""

import torch

from anabranch.ops.kda_decode.deterministic import kda_decode
from anabranch.ops.segments import Segments


def kda_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    segments: Segments,
    slots: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """See spec.py. Step i advances every segment that has an i-th token."""
    o = torch.empty_like(v)
    for step in range(max(segments.lengths)):
        active = [i for i, length in enumerate(segments.lengths) if step < length]
        at = segments.offsets[active] + step
        o[at] = kda_decode(q[at], k[at], v[at], g[at], beta[at], slots[active], state)
    return o
