"""Weights that are not merged with others: a bias-free linear, a norm, and vocabulary-parallel ends."""

import torch
import torch.nn.functional as F
from torch import nn

from anabranch.ops.norm.reference import rms_norm
from anabranch.parallel.collectives import Collectives


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

    def __init__(self, in_size: int, out_size: int, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__()
        self.weight = frozen(out_size, in_size, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension with a plain weight (not 1 + w)."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__()
        self.weight, self.eps = frozen(width, dtype=dtype, device=device), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class _VocabShard(nn.Module):
    """Rows `first .. first + local` of a [vocab, hidden] table; the last ranks may hold padding rows."""

    def __init__(
        self, vocab: int, hidden: int, ranks: int, rank: int, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        super().__init__()
        self.vocab, self.local = vocab, -(-vocab // ranks)
        self.first = rank * self.local
        self.weight = frozen(self.local, hidden, dtype=dtype, device=device)


class VocabEmbedding(_VocabShard):
    """Token embedding, rows sharded over the attention-TP group: masked look-up and sum."""

    def forward(self, tokens: torch.Tensor, comm: Collectives) -> torch.Tensor:
        local = tokens - self.first
        inside = (local >= 0) & (local < self.local)
        rows = F.embedding(local.clamp(0, self.local - 1), self.weight)
        return comm.all_reduce(torch.where(inside[:, None], rows, 0), "attn_tp")


class VocabHead(_VocabShard):
    """lm_head, rows sharded over the attention-TP group: fp32 logits [W, vocab] on every rank."""

    def forward(self, hidden: torch.Tensor, comm: Collectives) -> torch.Tensor:
        return comm.all_gather(F.linear(hidden, self.weight), "attn_tp")[:, : self.vocab].float()
