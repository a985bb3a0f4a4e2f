"""Prologue and decode step of a Kimi-K3 KDA layer in one graph: raw x in, normed and gated output out.

Weights and states are cold: sets of both take turns. Layers follow each other without norm and output projection, so
the figure is the sum of the two parts where the step's early reads hide behind the projection. The arms differ in where
f_b runs: in the projection's launch (path `fused`), in one of its own (`whole`), or inside the step (`deferred`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from anabranch.measure.arms import ArmTimes, Least, held_to, time_arms
from anabranch.measure.gate import BLOCK_EQUALITY
from anabranch.measure.kda_decode import CALLS, Case, D, few_rows, step_inputs
from anabranch.measure.timing import READ_BYTES_PER_S
from anabranch.ops.kda_step import cuda, triton
from anabranch.ops.kda_step.reference import kda_step as reference
from anabranch.ops.linear.spec import floor as linear_floor
from anabranch.ops.skinny_gemm.cuda import gemm_low_rank, linear
from anabranch.ops.skinny_gemm.spec import PROLOGUE_TOKENS, TOKENS

HIDDEN = 7168
COLD_BYTES = 400 << 20


class Layer(NamedTuple):
    """One turn: merged rows [q | k | v | g | f_a | b | pad], f_b [P, 128], the words of the one-launch path, slots."""

    merged: torch.Tensor
    f_b: torch.Tensor
    sync: torch.Tensor
    slots: torch.Tensor


class Chain(NamedTuple):
    """What all turns share: x [B, hidden], heads of this rank, and the step's other arguments."""

    x: torch.Tensor
    heads: int
    given: dict[str, Any]

    def step(self, run: Callable[..., torch.Tensor], y: torch.Tensor, slots: torch.Tensor, **more: Any) -> torch.Tensor:
        """`run` on the columns of a merged projection y; the decay's input is in `more`."""
        width = self.heads * D
        beta = y[:, 4 * width + D : 4 * width + D + self.heads]
        return run(**self.given, qkv=y[:, : 3 * width], gate=y[:, 3 * width : 4 * width], beta_logits=beta,
                   slots=slots, **more)  # fmt: skip

    def rank(self, y: torch.Tensor) -> torch.Tensor:
        """f_a's columns of y."""
        return y[:, 4 * self.heads * D :][:, :D]

    def fused(self, layer: Layer) -> torch.Tensor:
        """Projection and f_b in one launch, then the step."""
        second = layer.f_b.unsqueeze(0)
        y, (forget,) = gemm_low_rank(self.x, layer.merged, 4 * self.heads * D, second, layer.sync)
        return self.step(cuda.kda_step, y, layer.slots, forget=forget, early=True)

    def apart(self, layer: Layer) -> torch.Tensor:
        """Projection, f_b, step."""
        y = linear(self.x, layer.merged)
        return self.step(cuda.kda_step, y, layer.slots, forget=few_rows(self.rank(y), layer.f_b), early=True)

    def deferred(self, layer: Layer) -> torch.Tensor:
        """Projection, then the step with f_b inside."""
        y = linear(self.x, layer.merged)
        return self.step(cuda.kda_step, y, layer.slots, forget=self.rank(y), f_b=layer.f_b, early=True)

    def library(self, layer: Layer) -> torch.Tensor:
        """cuBLAS for both products, the step in Triton."""
        y = F.linear(self.x, layer.merged)
        return self.step(triton.kda_step, y, layer.slots, forget=F.linear(self.rank(y), layer.f_b))

    def reference(self, layer: Layer) -> torch.Tensor:
        """The chain of reference operations."""
        y = F.linear(self.x, layer.merged)
        return self.step(reference, y, layer.slots, forget=F.linear(self.rank(y), layer.f_b))


def bench_kda_chain(device: torch.device, cases: Sequence[tuple[int, ...]], hidden: int = HIDDEN) -> Iterator[ArmTimes]:
    """Cases of (heads, batch).

    Raises:
        GateRedError: an arm differs from the chain of library products and reference operations.
        ValueError: more requests than the few-token products take.
    """
    for heads, batch in cases:
        if batch > TOKENS:
            raise ValueError(f"cases={heads}x{batch}: the chain takes at most {TOKENS} requests")
        yield _bench(device, heads, batch, hidden)


def _bench(device: torch.device, heads: int, batch: int, hidden: int) -> ArmTimes:
    case = Case(heads=heads, batch=batch, f_b=True)
    chain, layers = _made(device, case, hidden)
    arms = {"f_b in the GEMM": chain.fused} if batch <= PROLOGUE_TOKENS else {}
    arms |= {"f_b apart": chain.apart, "f_b in the step": chain.deferred, "cublas, triton": chain.library}
    with held_to(f"kda_chain, {case}"):
        _check(chain, arms, layers[0])
    least = Least.of(linear_floor(batch, layers[0].merged.shape[0], hidden), READ_BYTES_PER_S) + Least.of(case.floor())
    return time_arms(
        "kda_chain",
        {"heads": heads, "batch": batch, "hidden": hidden, "state": "float32"},
        arms,
        layers,
        device,
        least=dict.fromkeys(arms, least),
        equality=BLOCK_EQUALITY.kind,
        calls=2 * CALLS,
    )


def _made(device: torch.device, case: Case, hidden: int) -> tuple[Chain, list[Layer]]:
    rows, width = 4 * case.heads * D + D + case.heads, case.heads * D
    rows += -rows % 16
    count = max(4, 1 + COLD_BYTES // (rows * hidden * 2))
    given, slots = step_inputs(device, case, count)
    for name in ("qkv", "gate", "beta_logits", "forget", "f_b"):
        del given[name]
    layers = [
        Layer(
            torch.empty(rows, hidden, device=device, dtype=torch.bfloat16).normal_(std=hidden**-0.5),
            torch.empty(width, D, device=device, dtype=torch.bfloat16).normal_(std=0.1),
            torch.zeros(2, dtype=torch.int32, device=device),
            turn,
        )
        for turn in slots
    ]
    return Chain(torch.randn(case.batch, hidden, device=device).bfloat16(), case.heads, given), layers


def _check(chain: Chain, arms: dict[str, Callable[[Layer], torch.Tensor]], layer: Layer) -> None:
    """Outputs and states of one step from the same pools; both pools are as before afterwards."""
    pools = {name: chain.given[name] for name in ("conv_pool", "state")}
    before = {name: pool.clone() for name, pool in pools.items()}
    found = {}
    for name, arm in {"reference": chain.reference, **arms}.items():
        y = arm(layer)
        found[name] = (y.clone(), pools["state"][layer.slots])
        for pool, tensor in pools.items():
            tensor.copy_(before[pool])
    for name in arms:
        for what, got, want in zip(("output", "state"), found[name], found["reference"], strict=True):
            BLOCK_EQUALITY.check(got.bfloat16(), want.bfloat16(), f"{name}, {what}")
