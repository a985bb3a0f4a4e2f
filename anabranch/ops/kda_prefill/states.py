"""Dense states for packages that take one a segment instead of slots of a pool."""

import torch


def initial_states(slots: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """[B, H, D, D] of the pool's dtype: each slot's state, zeros where there is no slot."""
    return torch.where((slots >= 0)[:, None, None, None], state[slots.clamp_min(0)], 0)


def store_states(final: torch.Tensor, slots: torch.Tensor, state: torch.Tensor) -> None:
    """Write the final states [B, H, D, D] of live slots without asking the device which they are.

    A segment without a slot writes the first live segment's state once more; if none is live, the last slot keeps its.
    """
    live = slots >= 0
    index = torch.arange(len(slots), device=slots.device)
    source = torch.where(live, index, live.int().argmax())
    target = slots[source]
    state[target] = torch.where(live.any(), final[source].to(state.dtype), state[target])
