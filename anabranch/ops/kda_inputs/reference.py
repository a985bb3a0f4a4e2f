"""The producer layouts as a chain of reference operations. See spec.py for shapes."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from anabranch.ops.arithmetic import row_sum, sigmoid
from anabranch.ops.conv.reference import conv
from anabranch.ops.kda_inputs.spec import Layout, width_of
from anabranch.ops.norm.reference import l2_norm
from anabranch.ops.segments import Segments


def kda_inputs(
    x: torch.Tensor,
    segments: Segments,
    slots: torch.Tensor,
    pool: torch.Tensor,
    weight: torch.Tensor,
    beta_logits: torch.Tensor,
    layout: Layout = "normed",
    total: Callable[[torch.Tensor], torch.Tensor] = row_sum,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Dense q, k, v and beta of the tokens."""
    used = sum(segments.lengths)
    padding = x.shape[0] - used
    mixed = F.pad(conv(x[:used], segments, slots, pool, weight), (0, 0, 0, padding))
    q, k, v = (part.unflatten(-1, width_of(beta_logits, x)).contiguous() for part in mixed.chunk(3, -1))
    live = torch.repeat_interleave(slots >= 0, segments.offsets.diff(), output_size=used)
    beta = torch.where(live[:, None], sigmoid(beta_logits[:used].float()), 0)
    if layout != "grouped":
        q, k = l2_norm(q, total), l2_norm(k, total)
    if layout == "rounded":
        q, k = q.to(x.dtype), k.to(x.dtype)
    return q, k, v, F.pad(beta, (0, 0, 0, padding))
