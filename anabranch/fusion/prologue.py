"""A layer's projections as one object: weights in, tensors out, by whichever path the plan chose.

The paths are in `kda_paths.py` and `mla_paths.py`, each a named function over one merged buffer. All paths of a kind
return the same tensors once they are `finished`: one path leaves a product to its reader. Slices of a wider GEMM are
strided views (unit inner stride): consumers take a row stride.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch

from anabranch.fusion import counters
from anabranch.fusion.buffer import MergedWeight, SplitWeight
from anabranch.fusion.fork import Branch, Fork
from anabranch.fusion.plan import EAGER, Moment
from anabranch.fusion.product import Factor, multiply
from anabranch.ops.registry import Ops
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
        whole, second = self.merged.factor("q_proj", "pad"), self.second.buffer
        assert isinstance(whole, torch.Tensor), "the rules keep adapters and FP8 out of this path"
        row0 = self.merged.size("q_proj", "g_proj" if sides == 1 else "v_proj")
        return self.ops.gemm_low_rank(x, whole, row0, second.unflatten(0, (sides, -1)), self.sync)


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
    """What a KDA layer computes on: qkv [T, 3P], forget [T, P], beta [T, H] logits, gate [T, P] logits.

    With `f_b` [P, rank] the decay is deferred: `forget` is f_a's output [T, rank], which its reader multiplies by f_b.
    """

    qkv: torch.Tensor
    forget: torch.Tensor
    beta: torch.Tensor
    gate: torch.Tensor
    f_b: torch.Tensor | None = None

    def rows(self, first: int, last: int | None = None) -> "KdaInputs":
        """The tokens first .. last, as views."""
        part = slice(first, last)
        return KdaInputs(self.qkv[part], self.forget[part], self.beta[part], self.gate[part], self.f_b)

    def finished(self, weights: KdaWeights) -> "KdaInputs":
        """The same with nothing left to do, by the product that `whole` makes: for readers that take no f_b."""
        if self.f_b is None:
            return self
        counters.add("kda.f_b_late")
        return replace(self, forget=weights.gemm(self.forget, weights.second.factor("f_b_proj")), f_b=None)

    def decay(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`forget` and `f_b` for the decode step, which does what is left to do."""
        if self.f_b is not None:
            counters.add("kda.f_b_in_step")
        return self.forget, self.f_b


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

    def finished(self, weights: MlaWeights) -> "MlaInputs":
        """Itself: every MLA path does all its products."""
        return self


@dataclass(frozen=True, slots=True)
class Path(Generic[Weights, Result]):
    """One way to run a prologue; `gemms` is the number of GEMM launches it makes.

    `complete` False: it leaves a product to its reader, so its time alone compares with no other path's.
    """

    name: str
    gemms: int
    run: Callable[[Weights, torch.Tensor], Result]
    complete: bool = True


class Prologue(Generic[Weights, Result]):
    """A layer's projections: x [T, hidden] in, tensors out. The plan chose how; the counters say what ran."""

    def __init__(self, kind: str, weights: Weights, choose: Callable[[int, Moment], Path[Weights, Result]]) -> None:
        self.kind, self.weights, self.choose = kind, weights, choose

    def __call__(self, x: torch.Tensor, moment: Moment = EAGER) -> Result:
        path = self.choose(x.shape[0], moment)
        counters.add(f"{self.kind}.{path.name}")
        return path.run(self.weights, x)
