"""Prompts through FlashKDA's kernels (the package `flash_kda`, bounded gates only). See spec.py for shapes.

The package norms and gates for itself. It takes dense bf16 rows and one dense state a segment, and has no snapshots:
states are gathered from the pool and written back. What is normed and gated already runs our Triton kernels.
Signature and contract: the package's README at github.com/MoonshotAI/FlashKDA.
"""

import flash_kda  # pyright: ignore[reportMissingImports]
import torch

from anabranch.ops.kda_prefill.chunked import kda_prefill
from anabranch.ops.kda_prefill.states import initial_states, store_states
from anabranch.ops.segments import Segments

__all__ = ["kda_prefill", "kda_prompt"]


def kda_prompt(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    forget: torch.Tensor,
    beta_logits: torch.Tensor,
    dt_bias: torch.Tensor,
    a_log: torch.Tensor,
    lower_bound: float | None,
    saves: torch.Tensor | None,
    segments: Segments,
    slots: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """See KDA_PROMPT in spec.py; D is 128, no segment may be empty.

    Raises:
        ValueError: a softplus gate, or states to be saved on the way.
    """
    if lower_bound is None or saves is not None:
        has = "lower_bound=None" if lower_bound is None else "saves"
        raise ValueError(f"kda_prompt: FlashKDA takes a bounded gate and saves no states on the way, given is {has}")
    used, (heads, dim) = sum(segments.lengths), v.shape[1:]
    rows = (t[:used].contiguous().unsqueeze(0) for t in (q, k, v, forget, beta_logits))
    before = initial_states(slots, state).contiguous()
    o, final = torch.empty(1, used, heads, dim, dtype=v.dtype, device=v.device), torch.empty_like(before)
    flash_kda.fwd(
        *(*rows, dim**-0.5, o, a_log.contiguous(), dt_bias.view(heads, dim).contiguous(), lower_bound),
        initial_state=before,
        final_state=final,
        cu_seqlens=segments.offsets,
    )
    store_states(final, slots, state)
    alive = torch.repeat_interleave(slots >= 0, segments.offsets.diff(), output_size=used)
    o = torch.where(alive[:, None, None], o[0], 0)
    return o if used == len(v) else torch.nn.functional.pad(o, (0, 0, 0, 0, 0, len(v) - used))
