"""The projection paths of both layer kinds: each a named function over one merged buffer.

All paths of a kind return the same tensors. Slices of a wider GEMM are strided views (unit inner stride): consumers
take a row stride. Weight rows, full-rank KDA: [q | k | v | g | f_a | b | pad]; low-rank KDA: [q | k | v | f_a | g_a
| b | pad]; MLA: [q_a or q | kv_a | g | pad].
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from anabranch.fusion import counters
from anabranch.fusion.buffer import MergedWeight
from anabranch.ops.registry import Ops
from anabranch.ops.spec import tolerance

KV_A = "kv_a_proj_with_mqa"

# a GEMM of other height may add its products in another order; deterministic kernels make this bitwise
EQUALITY = tolerance(2e-6, 8e-3)

Weights = TypeVar("Weights")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class KdaWeights:
    """`merged`: every projection that reads x. `second`: [f_b] or, low rank, [f_b ; g_b], rows of width rank."""

    merged: MergedWeight
    second: MergedWeight
    ops: Ops

    def gemm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """One counted GEMM."""
        counters.add("kda.gemm")
        return self.ops.linear(x, weight)


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """`merged`: every projection that reads x."""

    merged: MergedWeight
    ops: Ops

    @property
    def q(self) -> str:
        """Name of the query segment: q_a_proj or q_proj."""
        return self.merged.segments[0].name

    def gemm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """One counted GEMM."""
        counters.add("mla.gemm")
        return self.ops.linear(x, weight)


@dataclass(frozen=True, slots=True)
class KdaInputs:
    """What a KDA layer computes on: qkv [T, 3P], forget [T, P], beta [T, H] logits, gate [T, P] logits."""

    qkv: torch.Tensor
    forget: torch.Tensor
    beta: torch.Tensor
    gate: torch.Tensor

    def rows(self, first: int, last: int | None = None) -> "KdaInputs":
        """The tokens first .. last, as views."""
        part = slice(first, last)
        return KdaInputs(self.qkv[part], self.forget[part], self.beta[part], self.gate[part])


@dataclass(frozen=True, slots=True)
class MlaInputs:
    """What an MLA layer computes on: q [T, q_lora or H*qk], kv [T, r + rope], gate [T, H*v] logits or None."""

    q: torch.Tensor
    kv: torch.Tensor
    gate: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Path(Generic[Weights, Result]):
    """One way to run a prologue; `gemms` is the number of GEMM launches it makes."""

    name: str
    gemms: int
    run: Callable[[Weights, torch.Tensor], Result]


class Prologue(Generic[Weights, Result]):
    """A layer's projections: x [T, hidden] in, tensors out. The plan chose how; the counters say what ran."""

    def __init__(self, kind: str, weights: Weights, choose: Callable[[int], Path[Weights, Result]]) -> None:
        self.kind, self.weights, self.choose = kind, weights, choose

    def __call__(self, x: torch.Tensor) -> Result:
        path = self.choose(x.shape[0])
        counters.add(f"{self.kind}.{path.name}")
        return path.run(self.weights, x)


def _full_separate(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    qkv = w.gemm(x, w.merged.rows("q_proj", "v_proj"))
    beta = w.gemm(x, w.merged.rows("b_proj"))
    rank = w.gemm(x, w.merged.rows("f_a_proj"))
    forget = w.gemm(rank, w.second.rows("f_b_proj"))
    gate = w.gemm(x, w.merged.rows("g_proj"))
    return KdaInputs(qkv, forget, beta, gate)


def _full_split(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    qkvg = w.gemm(x, w.merged.rows("q_proj", "g_proj"))
    bfa = w.gemm(x, w.merged.rows("f_a_proj", "pad"))
    qkv, gate = qkvg.split([w.merged.size("q_proj", "v_proj"), w.merged.size("g_proj")], -1)
    return _full_tail(w, qkv, gate, bfa)


def _full_whole(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    out = w.gemm(x, w.merged.rows("q_proj", "pad"))
    sizes = [w.merged.size("q_proj", "v_proj"), w.merged.size("g_proj"), w.merged.size("f_a_proj", "pad")]
    qkv, gate, bfa = out.split(sizes, -1)
    return _full_tail(w, qkv, gate, bfa)


def _full_tail(w: KdaWeights, qkv: torch.Tensor, gate: torch.Tensor, bfa: torch.Tensor) -> KdaInputs:
    rank, beta, _ = bfa.split([w.merged.size(name) for name in ("f_a_proj", "b_proj", "pad")], -1)
    return KdaInputs(qkv, w.gemm(rank, w.second.rows("f_b_proj")), beta, gate)


def _low_separate(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    qkv = w.gemm(x, w.merged.rows("q_proj", "v_proj"))
    beta = w.gemm(x, w.merged.rows("b_proj"))
    forget = w.gemm(w.gemm(x, w.merged.rows("f_a_proj")), w.second.rows("f_b_proj"))
    gate = w.gemm(w.gemm(x, w.merged.rows("g_a_proj")), w.second.rows("g_b_proj"))
    return KdaInputs(qkv, forget, beta, gate)


def _low_split(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    qkv = w.gemm(x, w.merged.rows("q_proj", "v_proj"))
    return _low_tail(w, qkv, w.gemm(x, w.merged.rows("f_a_proj", "pad")))


def _low_whole(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    out = w.gemm(x, w.merged.rows("q_proj", "pad"))
    qkv, tail = out.split([w.merged.size("q_proj", "v_proj"), w.merged.size("f_a_proj", "pad")], -1)
    return _low_tail(w, qkv, tail)


def _low_tail(w: KdaWeights, qkv: torch.Tensor, tail: torch.Tensor) -> KdaInputs:
    """[f_b ; g_b] as one batched GEMM over the two ranks: [2, T, rank] x [2, rank, P]."""
    rank = w.merged.size("f_a_proj")
    beta = tail[:, 2 * rank : 2 * rank + w.merged.size("b_proj")]
    ranks = tail[:, : 2 * rank].unflatten(-1, (2, rank)).transpose(0, 1)
    counters.add("kda.gemm")
    forget, gate = w.ops.batched_linear(ranks, w.second.buffer.unflatten(0, (2, -1)))
    return KdaInputs(qkv, forget, beta, gate)


def _mla_separate(w: MlaWeights, x: torch.Tensor) -> MlaInputs:
    q, kv = w.gemm(x, w.merged.rows(w.q, KV_A)).split([w.merged.size(w.q), w.merged.size(KV_A)], -1)
    gate = w.gemm(x, w.merged.rows("g_proj")) if w.merged.segments[-1].name == "g_proj" else None
    return MlaInputs(q, kv, gate)


def _mla_merged(w: MlaWeights, x: torch.Tensor) -> MlaInputs:
    sizes = [w.merged.size(name) for name in (w.q, KV_A, "g_proj", "pad")]
    q, kv, gate, _ = w.gemm(x, w.merged.rows(w.q, "pad")).split(sizes, -1)
    return MlaInputs(q, kv, gate)


KDA_FULL_RANK: Mapping[str, Path[KdaWeights, KdaInputs]] = {
    "separate": Path("separate", 5, _full_separate),
    "split": Path("split", 3, _full_split),
    "whole": Path("whole", 2, _full_whole),
}
KDA_LOW_RANK: Mapping[str, Path[KdaWeights, KdaInputs]] = {
    "separate": Path("separate", 6, _low_separate),
    "split": Path("split", 3, _low_split),
    "whole": Path("whole", 2, _low_whole),
}
MLA_GATED: Mapping[str, Path[MlaWeights, MlaInputs]] = {
    "separate": Path("separate", 2, _mla_separate),
    "merged": Path("merged", 1, _mla_merged),
}
MLA_PLAIN: Mapping[str, Path[MlaWeights, MlaInputs]] = {"separate": Path("separate", 1, _mla_separate)}


def kda_paths(full_rank_gate: bool) -> Mapping[str, Path[KdaWeights, KdaInputs]]:
    """The KDA paths of a layout, by name."""
    return KDA_FULL_RANK if full_rank_gate else KDA_LOW_RANK


def mla_paths(output_gate: bool) -> Mapping[str, Path[MlaWeights, MlaInputs]]:
    """The MLA paths of a layout, by name. Without an output gate there is nothing to merge beyond QKV-A."""
    return MLA_GATED if output_gate else MLA_PLAIN
