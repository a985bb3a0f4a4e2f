"""Weights that are not merged with others: a bias-free linear, a norm, and vocabulary-parallel ends."""

import torch
import torch.nn.functional as F
from torch import nn

from anabranch.layers.build import Build


def frozen(*shape: int, dtype: torch.dtype, device: torch.device | str | None) -> nn.Parameter:
    """An uninitialised parameter; training code switches its gradient on."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def share(total: int, ranks: int, what: str) -> int:
    """total / ranks, or a ValueError that names `what`."""
    if total % ranks:
        raise ValueError(f"{what}={total} is not divisible by {ranks} ranks")
    return total // ranks


class Linear(nn.Module):
    """y = x W^T with W [out, in]. No linear of either model has a bias."""

    def __init__(self, build: Build, in_size: int, out_size: int) -> None:
        super().__init__()
        self.ops = build.ops
        self.weight = frozen(out_size, in_size, dtype=build.dtype, device=build.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(x, self.weight)


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension with a plain weight (not 1 + w)."""

    def __init__(self, build: Build, width: int, eps: float | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.ops, self.eps = build.ops, build.config.rms_norm_eps if eps is None else eps
        self.weight = frozen(width, dtype=dtype or build.dtype, device=build.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)


class _VocabShard(nn.Module):
    """Rows `first .. first + local` of a [vocab, hidden] table over attention-TP; the last ranks may hold padding."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.vocab, self.comm, self.ops = build.config.vocab_size, build.comm, build.ops
        self.local = -(-self.vocab // build.parallel.attn_tp_size)
        self.first = build.parallel.attn_tp_rank * self.local
        self.weight = frozen(self.local, build.config.hidden_size, dtype=build.dtype, device=build.device)


class VocabEmbedding(_VocabShard):
    """Token embedding: masked look-up and sum."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        local = tokens - self.first
        inside = (local >= 0) & (local < self.local)
        rows = F.embedding(local.clamp(0, self.local - 1), self.weight)
        return self.comm.all_reduce(torch.where(inside[:, None], rows, 0), "attn_tp")


class VocabHead(_VocabShard):
    """lm_head: fp32 logits [W, vocab] on every rank."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.comm.all_gather(self.ops.linear(hidden, self.weight), "attn_tp")[:, : self.vocab].float()
