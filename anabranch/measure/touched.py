"""How many experts a pass really reads: seen at the routers, not assumed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import mean
from typing import Any

import torch
from torch import nn

from anabranch.layers.experts import Mxfp4Experts, PlainExperts
from anabranch.layers.moe import MoeFfn


@dataclass(slots=True)
class Touched:
    """Of each MoE layer and pass: distinct local experts that some row chose, and the choices that fell on them."""

    experts: dict[str, list[int]] = field(default_factory=dict)
    choices: dict[str, list[int]] = field(default_factory=dict)

    @property
    def experts_mean(self) -> float:
        """Distinct local experts of a layer and pass."""
        return mean(n for counts in self.experts.values() for n in counts)

    @property
    def choices_mean(self) -> float:
        """(row, choice) pairs that a layer computes here in a pass."""
        return mean(n for counts in self.choices.values() for n in counts)


@contextmanager
def noting_experts(model: nn.Module) -> Iterator[Touched]:
    """Count in the block, in passes that are not replayed from a graph. Waits for the device at every router."""
    seen, hooks = Touched(), []
    for name, ffn in _ffns(model):
        hooks.append(ffn.gate.register_forward_hook(partial(_note, seen, name, ffn)))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _note(seen: Touched, name: str, ffn: MoeFfn, _: Any, __: Any, routing: tuple[torch.Tensor, torch.Tensor]) -> None:
    local = routing[1] - ffn.experts.first
    inside = local[(local >= 0) & (local < ffn.experts.count)]
    seen.experts.setdefault(name, []).append(len(inside.unique()))
    seen.choices.setdefault(name, []).append(len(inside))


def weight_bytes(model: nn.Module, touched: Touched) -> float:
    """Bytes of weights that a pass must read: routed experts by what was touched, everything else whole."""
    total = float(sum(p.numel() * p.element_size() for p in model.parameters()))
    for name, ffn in _ffns(model):
        bank: Any = ffn.experts
        assert isinstance(bank, PlainExperts | Mxfp4Experts)
        stacked = sum(p.numel() * p.element_size() for p in bank.parameters())
        total -= stacked * (1 - mean(touched.experts[name]) / bank.count)
    return total


def _ffns(model: nn.Module) -> Iterator[tuple[str, MoeFfn]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, MoeFfn))
