"""Weights that are not merged with others: a bias-free linear, a norm, and vocabulary-parallel ends."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from anabranch.fusion.buffer import PAD_ROWS, Fp8MergedWeight, MergedOwner, MergedWeight, Segment, SplitWeight
from anabranch.fusion.product import Adapted, Adapter, Factor, Fp8Rows, multiply
from anabranch.layers.build import Build
from anabranch.ops.fp8_linear.reference import CODES, blocks


def frozen(*shape: int, dtype: torch.dtype, device: torch.device | str | None) -> nn.Parameter:
    """An uninitialised parameter; training code switches its gradient on."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def share(total: int, ranks: int, what: str) -> int:
    """total / ranks, or a ValueError that names `what`."""
    if total % ranks:
        raise ValueError(f"{what}={total} is not divisible by {ranks} ranks")
    return total // ranks


def input_weight(owner: MergedOwner, segments: Sequence[Segment], build: Build) -> MergedWeight | SplitWeight:
    """The weight of all projections of an attention layer that read x: one buffer a format, children of `owner`.

    `in_proj` holds what is plain, or everything in block-FP8; where both formats occur, `in_proj_fp8` has the codes.
    """
    coded = [s for s in segments if build.is_fp8(s.name)]
    plain, hidden = [s for s in segments if s not in coded], build.config.hidden_size
    fp8 = Fp8MergedWeight(coded, hidden, device=build.device) if coded else None
    if not plain:
        assert fp8 is not None
        owner.in_proj = fp8
        return fp8
    rest = MergedWeight(plain, (hidden,), pad_to=PAD_ROWS, dtype=build.dtype, device=build.device)
    owner.in_proj = rest
    if fp8 is None:
        return rest
    owner.in_proj_fp8 = fp8
    return SplitWeight(fp8, rest)


class Linear(nn.Module):
    """y = x W^T with W [out, in]. No linear of either model has a bias.

    `name` is the projection's in its attention layer: what was resolved to block-FP8 is held as codes and scales.
    """

    def __init__(self, build: Build, in_size: int, out_size: int, name: str = "") -> None:
        super().__init__()
        self.ops = build.ops
        self.adapter: Adapter | None = None
        self.weight_scale_inv: nn.Parameter | None = None
        if build.is_fp8(name):
            self.weight = frozen(out_size, in_size, dtype=CODES, device=build.device)
            grid = blocks(out_size), blocks(in_size)
            self.weight_scale_inv = frozen(*grid, dtype=torch.float32, device=build.device)
        else:
            self.weight = frozen(out_size, in_size, dtype=build.dtype, device=build.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return multiply(self.ops, x, self._factor())

    def _factor(self) -> Factor:
        base = self.weight if self.weight_scale_inv is None else Fp8Rows(self.weight, self.weight_scale_inv)
        return base if self.adapter is None else Adapted(base, self.adapter)


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension with a plain weight (not 1 + w)."""

    def __init__(self, build: Build, width: int, eps: float | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.ops, self.eps = build.ops, build.config.rms_norm_eps if eps is None else eps
        self.weight = frozen(width, dtype=dtype or build.dtype, device=build.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, update: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x + update and its norm."""
        return self.ops.add_rms_norm(x, update, self.weight, self.eps)


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
        if self.local == self.vocab:
            return F.embedding(tokens, self.weight)
        local = tokens - self.first
        inside = (local >= 0) & (local < self.local)
        rows = F.embedding(local.clamp(0, self.local - 1), self.weight)
        return self.comm.all_reduce(torch.where(inside[:, None], rows, 0), "attn_tp")


class VocabHead(_VocabShard):
    """lm_head: logits [W, vocab] on every rank, in the model dtype: who adds to them or reads them widens its rows."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.comm.all_gather(self.ops.linear(hidden, self.weight), "attn_tp")[:, : self.vocab]
