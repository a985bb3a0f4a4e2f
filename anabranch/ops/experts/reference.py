"""Routed experts in plain PyTorch: one pair of GEMMs for each expert that some token chose. See spec.py for shapes."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from anabranch.config.model import ActivationConfig
from anabranch.ops.glu.reference import glu
from anabranch.ops.linear.reference import linear


class ExpertBank(Protocol):
    """Weights of the experts `first .. first + count - 1`, in whatever format they are kept."""

    first: int
    count: int
    total: int  # experts of all ranks together

    def gate_up(self, expert: int) -> torch.Tensor:
        """[2*I, W] of local expert `expert`: gate rows, then up rows."""
        ...

    def down(self, expert: int) -> torch.Tensor:
        """[W, I] of local expert `expert`."""
        ...


def mean_pairs(tokens: int, top_k: int, bank: ExpertBank) -> float:
    """(token, choice) pairs that an expert gets on average; most choices may be of other ranks' experts."""
    return tokens * top_k / bank.total


def stacks(bank: ExpertBank) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor], bool]:
    """(gate-up, its scale), (down, its scale) and whether they are MXFP4; a plain stack stands in for its own scale."""
    store: Any = bank
    if hasattr(bank, "w13_packed"):
        return (store.w13_packed, store.w13_scale), (store.w2_packed, store.w2_scale), True
    return (store.w13, store.w13), (store.w2, store.w2), False


def routed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    bank: ExpertBank,
    activation: ActivationConfig,
    linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = linear,
    glu: Callable[[torch.Tensor, ActivationConfig], torch.Tensor] = glu,
) -> torch.Tensor:
    """sum_e weights_e * down_e(glu(gate_up_e x)) over the local experts."""
    y = torch.zeros_like(x).float()
    pairs, counts = _local_pairs(experts, bank)
    scales, sizes = weights.flatten().index_select(0, pairs).unsqueeze(-1), list(counts.values())
    parts = zip(counts, (pairs // experts.shape[1]).split(sizes), scales.split(sizes), strict=True)
    for expert, tokens, scale in parts:
        hidden = glu(linear(x.index_select(0, tokens), bank.gate_up(expert)), activation)
        y = y.index_add(0, tokens, linear(hidden, bank.down(expert)).float() * scale)
    return y


def _local_pairs(experts: torch.Tensor, bank: ExpertBank) -> tuple[torch.Tensor, Mapping[int, int]]:
    """Indices into `experts`, flat, of what chose a local expert, in its order; how many chose each, ascending."""
    chosen, pairs = experts.flatten().sort(stable=True)
    counts = Counter(chosen.tolist())
    first, last = bank.first, bank.first + bank.count
    before = sum(count for expert, count in counts.items() if expert < first)
    local = {expert - first: count for expert, count in counts.items() if first <= expert < last}
    return pairs[before : before + sum(local.values())], local
