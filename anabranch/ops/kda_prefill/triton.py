"""The token form over whole segments on the GPU: the decode kernel, so a token's bits do not know how it was cut."""

import torch

from anabranch.ops.kda_decode.triton import delta_rule
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
    """See spec.py; equal to as many decode steps, bit for bit. D is a power of two from 16 up."""
    return delta_rule(q, k, v, g, beta, segments, slots, state)
