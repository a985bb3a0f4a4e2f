"""The projection paths of both layer kinds: each a named function over one merged buffer.

All paths of a kind return the same tensors. Slices of a wider GEMM are strided views (unit inner stride): consumers
take a row stride. An `overlap` path runs the small GEMMs, or those that are needed last, on a side stream (fork.py);
`fused` runs all products of a KDA layer in one launch.
Weight rows, full-rank KDA: [q | k | v | g | f_a | b | pad]; low-rank KDA: [q | k | v | f_a | g_a | b | pad]; MLA:
[q_a or q | kv_a | g | pad]. Rows in block-FP8 have a buffer of their own (fusions.md); `single` merges nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from anabranch.fusion import counters
from anabranch.fusion.buffer import MergedWeight, SplitWeight
from anabranch.fusion.fork import Branch, Fork
from anabranch.fusion.plan import EAGER, Moment
from anabranch.fusion.product import Factor, multiply
from anabranch.ops.registry import Ops
from anabranch.ops.skinny_gemm.spec import PROLOGUE_TOKENS
from anabranch.ops.spec import tolerance

KV_A = "kv_a_proj_with_mqa"

# a GEMM of other height may add its products in another order; deterministic kernels make this bitwise
EQUALITY = tolerance(2e-6, 8e-3)

Weights = TypeVar("Weights")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class KdaWeights:
    """`merged`: every projection that reads x. `second`: [f_b] or, low rank, [f_b ; g_b], rows of width rank.

    `sync`: two zero words that the one-launch path needs for itself.
    """

    merged: MergedWeight | SplitWeight
    second: MergedWeight
    ops: Ops
    branch: Branch = field(default_factory=Branch)
    sync: torch.Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.int32))

    def gemm(self, x: torch.Tensor, weight: Factor) -> torch.Tensor:
        """One counted GEMM."""
        counters.add("kda.gemm")
        return multiply(self.ops, x, weight)

    def both(self, x: torch.Tensor, sides: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows of `merged` and, in the same launch, `second` on the ranks: [T, rows] and [sides, T, P]."""
        counters.add("kda.gemm")
        whole, second = self.merged.factor("q_proj", "pad"), self.second.rows(*self.second_span)
        assert isinstance(whole, torch.Tensor), "the rules keep adapters and FP8 out of this path"
        row0 = self.merged.size("q_proj", "g_proj" if sides == 1 else "v_proj")
        return self.ops.gemm_low_rank(x, whole, row0, second.unflatten(0, (sides, -1)), self.sync)

    @property
    def second_span(self) -> tuple[str, str]:
        """First and last segment of `second`."""
        return self.second.segments[0].name, self.second.segments[-1].name


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """`merged`: every projection that reads x."""

    merged: MergedWeight | SplitWeight
    ops: Ops
    branch: Branch = field(default_factory=Branch)

    @property
    def q(self) -> str:
        """Name of the query segment: q_a_proj or q_proj."""
        return next(s.name for s in self.merged.segments if s.name.startswith("q_"))

    @property
    def gated(self) -> bool:
        """Whether there is an output gate."""
        return any(s.name == "g_proj" for s in self.merged.segments)

    def gemm(self, x: torch.Tensor, weight: Factor) -> torch.Tensor:
        """One counted GEMM."""
        counters.add("mla.gemm")
        return multiply(self.ops, x, weight)


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
    """What an MLA layer computes on: q [T, q_lora or H*qk], kv [T, r + rope], gate [T, H*v] logits or None.

    The gate may still be under way: `gate.take()`, once, makes the main stream wait for it. Whoever calls an MLA
    prologue closes its result on every way out, with the gate taken or not.
    """

    q: torch.Tensor
    kv: torch.Tensor
    gate: Fork[torch.Tensor] | None

    def close(self) -> None:
        """A gate that nobody took is dropped."""
        if self.gate is not None:
            self.gate.close()


@dataclass(frozen=True, slots=True)
class Path(Generic[Weights, Result]):
    """One way to run a prologue; `gemms` is the number of GEMM launches it makes."""

    name: str
    gemms: int
    run: Callable[[Weights, torch.Tensor], Result]


class Prologue(Generic[Weights, Result]):
    """A layer's projections: x [T, hidden] in, tensors out. The plan chose how; the counters say what ran."""

    def __init__(self, kind: str, weights: Weights, choose: Callable[[int, Moment], Path[Weights, Result]]) -> None:
        self.kind, self.weights, self.choose = kind, weights, choose

    def __call__(self, x: torch.Tensor, moment: Moment = EAGER) -> Result:
        path = self.choose(x.shape[0], moment)
        counters.add(f"{self.kind}.{path.name}")
        return path.run(self.weights, x)


def _full_separate(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    qkv = w.gemm(x, w.merged.factor("q_proj", "v_proj"))
    beta = w.gemm(x, w.merged.factor("b_proj"))
    rank = w.gemm(x, w.merged.factor("f_a_proj"))
    forget = w.gemm(rank, w.second.factor("f_b_proj"))
    gate = w.gemm(x, w.merged.factor("g_proj"))
    return KdaInputs(qkv, forget, beta, gate)


def _full_split(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    qkvg = w.gemm(x, w.merged.factor("q_proj", "g_proj"))
    bfa = w.gemm(x, w.merged.factor("f_a_proj", "pad"))
    qkv, gate = qkvg.split([w.merged.size("q_proj", "v_proj"), w.merged.size("g_proj")], -1)
    return _full_tail(w, qkv, gate, bfa)


def _full_whole(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    out = w.gemm(x, w.merged.factor("q_proj", "pad"))
    sizes = [w.merged.size("q_proj", "v_proj"), w.merged.size("g_proj"), w.merged.size("f_a_proj", "pad")]
    qkv, gate, bfa = out.split(sizes, -1)
    return _full_tail(w, qkv, gate, bfa)


def _full_fused(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    """One launch; more tokens than it was made for take two."""
    if x.shape[0] > PROLOGUE_TOKENS:
        return _full_whole(w, x)
    out, (forget,) = w.both(x, 1)
    sizes = [w.merged.size("q_proj", "v_proj"), w.merged.size("g_proj"), w.merged.size("f_a_proj")]
    sizes += [w.merged.size(name) for name in ("b_proj", "pad")]
    qkv, gate, _, beta, _ = out.split(sizes, -1)
    return KdaInputs(qkv, forget, beta, gate)


def _full_overlap(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    qkvg, (forget, beta) = w.branch.beside(
        "kda.bfa",
        x,
        main=lambda: w.gemm(x, w.merged.factor("q_proj", "g_proj")),
        side=lambda: _forget(w, w.gemm(x, w.merged.factor("f_a_proj", "pad"))),
    )
    qkv, gate = qkvg.split([w.merged.size("q_proj", "v_proj"), w.merged.size("g_proj")], -1)
    return KdaInputs(qkv, forget, beta, gate)


def _full_tail(w: KdaWeights, qkv: torch.Tensor, gate: torch.Tensor, bfa: torch.Tensor) -> KdaInputs:
    forget, beta = _forget(w, bfa)
    return KdaInputs(qkv, forget, beta, gate)


def _forget(w: KdaWeights, bfa: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """forget [T, P] and beta [T, H] from the columns [f_a | b | pad]."""
    rank, beta, _ = bfa.split([w.merged.size(name) for name in ("f_a_proj", "b_proj", "pad")], -1)
    return w.gemm(rank, w.second.factor("f_b_proj")), beta


def _low_separate(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    qkv = w.gemm(x, w.merged.factor("q_proj", "v_proj"))
    beta = w.gemm(x, w.merged.factor("b_proj"))
    forget = w.gemm(w.gemm(x, w.merged.factor("f_a_proj")), w.second.factor("f_b_proj"))
    gate = w.gemm(w.gemm(x, w.merged.factor("g_a_proj")), w.second.factor("g_b_proj"))
    return KdaInputs(qkv, forget, beta, gate)


def _low_split(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    qkv = w.gemm(x, w.merged.factor("q_proj", "v_proj"))
    return KdaInputs(qkv, *_low_tail(w, w.gemm(x, w.merged.factor("f_a_proj", "pad"))))


def _low_whole(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    out = w.gemm(x, w.merged.factor("q_proj", "pad"))
    qkv, tail = out.split([w.merged.size("q_proj", "v_proj"), w.merged.size("f_a_proj", "pad")], -1)
    return KdaInputs(qkv, *_low_tail(w, tail))


def _low_fused(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    """One launch; more tokens than it was made for take two."""
    if x.shape[0] > PROLOGUE_TOKENS:
        return _low_whole(w, x)
    out, (forget, gate) = w.both(x, 2)
    sizes = [w.merged.size("q_proj", "v_proj"), w.merged.size("f_a_proj", "g_a_proj")]
    qkv, _, beta, _ = out.split([*sizes, *(w.merged.size(name) for name in ("b_proj", "pad"))], -1)
    return KdaInputs(qkv, forget, beta, gate)


def _low_overlap(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    qkv, tail = w.branch.beside(
        "kda.tail",
        x,
        main=lambda: w.gemm(x, w.merged.factor("q_proj", "v_proj")),
        side=lambda: _low_tail(w, w.gemm(x, w.merged.factor("f_a_proj", "pad"))),
    )
    return KdaInputs(qkv, *tail)


def _low_tail(w: KdaWeights, tail: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """forget [T, P], beta [T, H] and gate [T, P] from the columns [f_a | g_a | b | pad].

    [f_b ; g_b] is one batched GEMM over the two ranks: [2, T, rank] x [2, rank, P].
    """
    rank = w.merged.size("f_a_proj")
    beta = tail[:, 2 * rank : 2 * rank + w.merged.size("b_proj")]
    ranks = tail[:, : 2 * rank].unflatten(-1, (2, rank)).transpose(0, 1)
    counters.add("kda.gemm")
    forget, gate = w.ops.batched_linear(ranks, w.second.buffer.unflatten(0, (2, -1)))
    return forget, beta, gate


def _kda_single(w: KdaWeights, x: torch.Tensor) -> KdaInputs:
    """Nothing is merged; q, k and v are copied together afterwards."""
    qkv = torch.cat([w.gemm(x, w.merged.factor(f"{n}_proj")) for n in "qkv"], -1)
    beta = w.gemm(x, w.merged.factor("b_proj"))
    forget = w.gemm(w.gemm(x, w.merged.factor("f_a_proj")), w.second.factor("f_b_proj"))
    if any(s.name == "g_proj" for s in w.merged.segments):
        return KdaInputs(qkv, forget, beta, w.gemm(x, w.merged.factor("g_proj")))
    return KdaInputs(qkv, forget, beta, w.gemm(w.gemm(x, w.merged.factor("g_a_proj")), w.second.factor("g_b_proj")))


def _mla_separate(w: MlaWeights, x: torch.Tensor) -> MlaInputs:
    q, kv = _qkv_a(w, x)
    return MlaInputs(q, kv, _gate(w, x))


def _mla_merged(w: MlaWeights, x: torch.Tensor) -> MlaInputs:
    """The order of the rows is the buffer's: block-FP8 has the gate first, where no scale block is shared."""
    order = [s.name for s in w.merged.segments]
    out = w.gemm(x, w.merged.factor(order[0], "pad")).split([w.merged.size(name) for name in (*order, "pad")], -1)
    q, kv, gate = (out[order.index(name)] for name in (w.q, KV_A, "g_proj"))
    return MlaInputs(q, kv, Fork.ready(gate))


def _mla_single(w: MlaWeights, x: torch.Tensor) -> MlaInputs:
    """Nothing is merged."""
    return MlaInputs(w.gemm(x, w.merged.factor(w.q)), w.gemm(x, w.merged.factor(KV_A)), _gate(w, x))


def _gate(w: MlaWeights, x: torch.Tensor) -> Fork[torch.Tensor] | None:
    return Fork.ready(w.gemm(x, w.merged.factor("g_proj"))) if w.gated else None


def _mla_overlap(w: MlaWeights, x: torch.Tensor) -> MlaInputs:
    """The gate leaves here and joins where it is taken: beside QKV-A and the whole attention."""
    gate = w.branch.fork("mla.gate", x, lambda: w.gemm(x, w.merged.factor("g_proj")))
    try:
        return MlaInputs(*_qkv_a(w, x), gate)
    except BaseException:
        gate.close()
        raise


def _qkv_a(w: MlaWeights, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, kv = w.gemm(x, w.merged.factor(w.q, KV_A)).split([w.merged.size(w.q), w.merged.size(KV_A)], -1)
    return q, kv


KDA_FULL_RANK: Mapping[str, Path[KdaWeights, KdaInputs]] = {
    "separate": Path("separate", 5, _full_separate),
    "split": Path("split", 3, _full_split),
    "whole": Path("whole", 2, _full_whole),
    "overlap": Path("overlap", 3, _full_overlap),
    "fused": Path("fused", 1, _full_fused),
    "single": Path("single", 7, _kda_single),
}
KDA_LOW_RANK: Mapping[str, Path[KdaWeights, KdaInputs]] = {
    "separate": Path("separate", 6, _low_separate),
    "split": Path("split", 3, _low_split),
    "whole": Path("whole", 2, _low_whole),
    "overlap": Path("overlap", 3, _low_overlap),
    "fused": Path("fused", 1, _low_fused),
    "single": Path("single", 8, _kda_single),
}
MLA_GATED: Mapping[str, Path[MlaWeights, MlaInputs]] = {
    "separate": Path("separate", 2, _mla_separate),
    "merged": Path("merged", 1, _mla_merged),
    "overlap": Path("overlap", 2, _mla_overlap),
    "single": Path("single", 3, _mla_single),
}
MLA_PLAIN: Mapping[str, Path[MlaWeights, MlaInputs]] = {
    "separate": Path("separate", 1, _mla_separate),
    "single": Path("single", 2, _mla_single),
}


def kda_paths(full_rank_gate: bool) -> Mapping[str, Path[KdaWeights, KdaInputs]]:
    """The KDA paths of a layout, by name."""
    return KDA_FULL_RANK if full_rank_gate else KDA_LOW_RANK


def mla_paths(output_gate: bool) -> Mapping[str, Path[MlaWeights, MlaInputs]]:
    """The MLA paths of a layout, by name. Without an output gate there is nothing to merge beyond QKV-A."""
    return MLA_GATED if output_gate else MLA_PLAIN
