"""The chunk form through fla-core's Triton kernels (the package `fla`, 0.6 or newer). See spec.py for shapes.

Its matrix products take bf16 operands, so q and k are rounded to the model dtype here; gates, sums and the states
that leave it stay fp32.
"""

import torch
from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]

from anabranch.ops.kda_prefill.states import initial_states, store_states
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
    """See spec.py. No segment may be empty; the package tunes its tiles at the first call of a shape class."""
    live = slots >= 0
    with torch.inference_mode():
        o, final = chunk_kda(
            *(t.unsqueeze(0) for t in (q.to(v.dtype), k.to(v.dtype), v.contiguous(), g, beta)),
            initial_state=initial_states(slots, state).float(),
            output_final_state=True,
            state_v_first=True,
            cu_seqlens=segments.offsets,
            cu_seqlens_cpu=_host_offsets(segments),
        )
    store_states(final, slots, state)
    alive = torch.repeat_interleave(live, segments.offsets.diff(), output_size=v.shape[0])
    return torch.where(alive[:, None, None], o[0], 0)


def _host_offsets(segments: Segments) -> torch.Tensor:
    """The offsets from the host's own numbers: the package would wait for the device to read them."""
    return Segments.of(segments.lengths, device="cpu").offsets
