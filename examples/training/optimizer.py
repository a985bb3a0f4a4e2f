"""Muon for matrices, AdamW for the rest, over fp32 masters of parameters of any dtype; a step never asks the device.

Muon after K. Jordan (kellerjordan.github.io/posts/muon); update scale after arXiv 2502.16982 (Moonlight), so that both
share one learning rate. Merged buffers are taken apart: each projection is a matrix of its own.
"""

from collections import defaultdict
from collections.abc import Iterator
from types import EllipsisType

import torch
from torch import nn

from anabranch.fusion.buffer import MergedWeight
from anabranch.layers.experts import PlainExperts

BETAS, MOMENTUM, EPS = (0.9, 0.95), 0.95, 1e-10
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NARROW = 16  # a matrix with a side below this is a vector to us

Index = tuple[EllipsisType | slice, ...]


class _Piece:
    """Part of a parameter that is one tensor of the checkpoint, with its fp32 master and moments.

    `second` is None where Muon works: on the matrices [..., rows, columns] of `master`.
    """

    def __init__(self, parameter: nn.Parameter, index: Index, muon: bool) -> None:
        self.parameter, self.index = parameter, index
        self.master = parameter.detach()[index].to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
        self.first = torch.zeros_like(self.master)
        self.second = None if muon else torch.zeros_like(self.master)

    @property
    def gradient(self) -> torch.Tensor:
        assert self.parameter.grad is not None
        return self.parameter.grad[self.index].to(self.master.dtype, copy=True)

    def publish(self) -> None:
        self.parameter[self.index].copy_(self.master)


class Optimizer:
    """Updates every parameter of `model` that has its gradient switched on.

    Attributes:
        rate: learning rate, on the device so that a captured step can be given another.
        count: steps taken, on the device.
        norm: of the last step's gradients before they were clipped to `clip`.
    """

    def __init__(self, model: nn.Module, *, decay: float = 0.05, clip: float = 1.0) -> None:
        self.decay, self.clip = decay, clip
        self.pieces = list(_pieces(model))
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        device = self.parameters[0].device
        self.rate, self.count, self.norm = (torch.zeros((), device=device) for _ in range(3))

    def clear(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """One update from the gradients at hand; every parameter must have one."""
        self.count += 1
        gradients = [piece.gradient for piece in self.pieces]
        self.norm.copy_(torch.stack(torch._foreach_norm(gradients)).norm())
        torch._foreach_mul_(gradients, torch.clamp(self.clip / (self.norm + 1e-6), max=1.0).to(gradients[0].dtype))
        pairs = list(zip(self.pieces, gradients, strict=True))
        self._adam([pair for pair in pairs if pair[0].second is not None])
        self._muon([pair for pair in pairs if pair[0].second is None])
        for piece in self.pieces:
            piece.publish()

    def _adam(self, pairs: list[tuple[_Piece, torch.Tensor]]) -> None:
        gradients = [gradient for _, gradient in pairs]
        first, second = [piece.first for piece, _ in pairs], [piece.second for piece, _ in pairs]
        torch._foreach_lerp_(first, gradients, 1 - BETAS[0])
        torch._foreach_mul_(second, BETAS[1])
        torch._foreach_addcmul_(second, gradients, gradients, 1 - BETAS[1])
        scale = torch._foreach_sqrt(torch._foreach_mul(second, 1 / (1 - BETAS[1] ** self.count)))
        torch._foreach_add_(scale, EPS)
        updates = torch._foreach_mul(first, self.rate / (1 - BETAS[0] ** self.count))
        torch._foreach_div_(updates, scale)
        torch._foreach_sub_([piece.master for piece, _ in pairs], updates)

    def _muon(self, pairs: list[tuple[_Piece, torch.Tensor]]) -> None:
        """Matrices of one shape together, each orthogonalised by itself."""
        gradients, first = [gradient for _, gradient in pairs], [piece.first for piece, _ in pairs]
        torch._foreach_lerp_(first, gradients, 1 - MOMENTUM)
        torch._foreach_lerp_(gradients, first, MOMENTUM)  # Nesterov
        groups: dict[torch.Size, list[tuple[_Piece, torch.Tensor]]] = defaultdict(list)
        for piece, towards in pairs:
            groups[towards.shape[-2:]].append((piece, towards))
        for shape, members in groups.items():
            stacks = [towards.reshape(-1, *shape) for _, towards in members]
            updates = orthogonal(torch.cat(stacks)) * (self.rate * (0.2 * max(shape) ** 0.5))
            masters = [piece.master for piece, _ in members]
            parts = updates.split([len(stack) for stack in stacks])
            torch._foreach_mul_(masters, (1 - self.rate * self.decay).to(masters[0].dtype))
            torch._foreach_sub_(masters, [u.view(m.shape) for u, m in zip(parts, masters, strict=True)])


def orthogonal(x: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """[n, rows, columns] with all singular values moved near 1, by the quintic Newton-Schulz iteration in bf16."""
    a, b, c = _COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    y = x.mT if tall else x
    y = (y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(steps):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return (y.mT if tall else y).to(x.dtype)


def _pieces(model: nn.Module) -> Iterator[_Piece]:
    """Every tensor that learns. Padding rows of merged buffers belong to none and stay zero.

    AdamW takes vectors, taps, the vocabulary's ends, routers, residual reads and strengths; Muon the other matrices.
    """
    parts: dict[int, list[Index]] = {}
    for module in model.modules():
        if isinstance(module, MergedWeight):
            parts[id(module.buffer)] = _segments(module)
        elif isinstance(module, PlainExperts):
            halves = slice(0, module.inner), slice(module.inner, 2 * module.inner)
            parts[id(module.w13)] = [(..., half, slice(None)) for half in halves]
    for name, parameter in model.named_parameters():
        ends = "embed_tokens" in name or "lm_head" in name or name.endswith((".gate.weight", ".conv.buffer"))
        for index in parts.get(id(parameter), [(...,)]) if parameter.requires_grad else []:
            shape = parameter[index].shape
            yield _Piece(parameter, index, not ends and len(shape) >= 2 and min(shape[-2:]) >= _NARROW)


def _segments(merged: MergedWeight) -> list[Index]:
    found: list[Index] = []
    start = 0
    for segment in merged.segments:
        found.append((slice(start, start + segment.rows),))
        start += segment.rows
    return found
