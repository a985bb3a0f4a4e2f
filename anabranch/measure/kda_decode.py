"""The fused KDA decode step, states cold in the L2: CUDA, Triton and the chain of separate operations.

Sets of slots rotate over more than 330 MB; steps follow each other directly, as layers would without projections.
`f_b` and the convolution's weights are the same in every step. No arm is timed that does not equal the chain of
reference operations.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from anabranch.measure.arms import ArmTimes, Least, held_to, sets_for, time_arms
from anabranch.ops.arithmetic import sigmoid
from anabranch.ops.conv.triton import conv
from anabranch.ops.kda_decode.triton import kda_decode
from anabranch.ops.kda_gate.reference import log_decay
from anabranch.ops.kda_step import cuda, triton
from anabranch.ops.kda_step.reference import kda_step as reference
from anabranch.ops.kda_step.spec import KDA_STEP, floor
from anabranch.ops.norm.triton import gated_rms_norm, l2_norm
from anabranch.ops.segments import Segments
from anabranch.ops.skinny_gemm.cuda import low_rank
from anabranch.ops.spec import Floor

D = 128
LEAST_SETS, CALLS = 4, 12
STATE_ERROR = {torch.float32: 2e-4, torch.bfloat16: 4e-3}  # of the norm, against the chain of reference operations
Step = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """`f_b`: the decay's second product is inside or in front. `tokens` of each request in one launch."""

    heads: int
    batch: int
    tokens: int = 1
    state: torch.dtype = torch.float32
    f_b: bool = False

    def document(self) -> dict[str, Any]:
        """As a result row has it."""
        names = {"heads": self.heads, "batch": self.batch, "state": str(self.state).removeprefix("torch.")}
        return names | {"tokens": self.tokens, "f_b": self.f_b}

    def floor(self) -> Floor:
        """As the operation's, with f_b's weights."""
        least = floor(self.batch, self.heads, self.tokens, self.state.itemsize)
        return Floor(bytes=least.bytes + self.f_b * self.heads * D * D * 2, flops=least.flops)


def bench_kda_decode(device: torch.device, cases: Sequence[Case], *, variants: bool = False) -> Iterator[ArmTimes]:
    """Every case; `variants`: every compiled variant, early and late, instead of the other ways to run a step.

    Raises:
        GateRedError: an arm differs from the chain of reference operations.
    """
    for case in cases:
        yield _bench(device, case, variants)


def step_inputs(device: torch.device, case: Case, sets: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Arguments of a step, and the slots of each set that takes its turn."""

    def randn(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return (torch.randn(shape, device=device) * scale).to(dtype)

    heads, width, rows, slots = case.heads, case.heads * D, case.batch * case.tokens, sets * case.batch
    wide = randn(rows, 4 * width + D + heads + -(D + heads) % 16)
    pool = torch.empty(slots, heads, D, D, device=device, dtype=case.state).normal_(std=0.1)
    given = {
        "qkv": wide[:, : 3 * width],
        "conv_pool": randn(slots, 3, 3 * width),
        "conv_weight": randn(3 * width, 4, scale=0.3, dtype=torch.float32),
        "forget": wide[:, 4 * width : 4 * width + D] if case.f_b else randn(rows, width),
        "beta_logits": wide[:, 4 * width + D : 4 * width + D + heads],
        "gate": wide[:, 3 * width : 4 * width],
        "dt_bias": randn(width, scale=0.5, dtype=torch.float32),
        "a_log": randn(heads, scale=0.5, dtype=torch.float32),
        "lower_bound": -5.0,
        "norm_weight": 1 + randn(D, scale=0.1, dtype=torch.float32),
        "eps": 1e-5,
        "state": pool,
    }
    given |= {"f_b": randn(width, D, scale=0.1)} if case.f_b else {}
    return given, list(torch.randperm(slots, device=device).view(sets, case.batch).unbind())


def chain(single: Segments) -> Step:
    """The layer's separate operations, as it runs them where there is no fused step; `single` token a request."""

    def run(
        qkv: torch.Tensor,
        conv_pool: torch.Tensor,
        conv_weight: torch.Tensor,
        forget: torch.Tensor,
        beta_logits: torch.Tensor,
        gate: torch.Tensor,
        dt_bias: torch.Tensor,
        a_log: torch.Tensor,
        lower_bound: float | None,
        norm_weight: torch.Tensor,
        eps: float,
        slots: torch.Tensor,
        state: torch.Tensor,
    ) -> torch.Tensor:
        heads = state.shape[1:3]
        mixed = conv(qkv, single, slots, conv_pool, conv_weight)
        q, k, v = (part.unflatten(-1, heads) for part in mixed.chunk(3, -1))
        g = log_decay(forget.unflatten(-1, heads), dt_bias, a_log, lower_bound)
        o = kda_decode(l2_norm(q), l2_norm(k), v, g, sigmoid(beta_logits.float()), slots, state)
        return gated_rms_norm(o, gate, norm_weight, eps)

    return run


def _first(product: Callable[..., torch.Tensor], step: Step, **given: Any) -> torch.Tensor:
    """f_b as a product in front of the step."""
    f_b = given.pop("f_b")
    return step(**given | {"forget": product(given["forget"], f_b)})


def few_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Our own product of rank 128: [B, 128] and [P, 128] -> [B, P]."""
    return low_rank(x.unsqueeze(0), w.unsqueeze(0)).squeeze(0)


def _token_by_token(step: Step, tokens: int, **given: Any) -> torch.Tensor:
    """One launch a token; the output of the last."""
    names = ("qkv", "forget", "beta_logits", "gate")
    return [step(**given | {name: given[name][token::tokens] for name in names}) for token in range(tokens)][-1]


def _arms(device: torch.device, case: Case, variants: bool) -> dict[str, Step]:
    """By name; the first is the one that the others are compared with."""
    early = partial(cuda.kda_step, early=True)
    if case.f_b:
        in_front = {"f_b in front": F.linear, "f_b in front, skinny": few_rows}
        return {"f_b inside": early} | {name: partial(_first, run, early) for name, run in in_front.items()}
    if case.tokens > 1:
        return {"one launch": early, "a launch each": partial(_token_by_token, early, case.tokens)}
    chosen = cuda.choose(case.heads * case.batch, case.state)
    if variants:
        return {f"chosen: {chosen.variant}": early} | _variants(case.state)
    plain = cuda.Plan(chosen.variant, chosen.prefetch, chained=False)
    single = Segments.of([1] * case.batch, device=device)
    return {
        "cuda": early,
        "cuda, no early reads": cuda.kda_step,
        "cuda, not chained": partial(cuda.kda_step, plan=plain),
        "triton": triton.kda_step,
        "chain": chain(single),
    }


def _variants(state: torch.dtype) -> dict[str, Step]:
    kind = "bf16" if state == torch.bfloat16 else "f32"
    names = [n for n in cuda.variants() if n.startswith(kind) and "_fb" not in n and "_many" not in n]
    # at once would let steps pile up that take the same states again
    when = {"": cuda.Release.BEHIND_WAIT, " late": cuda.Release.BEHIND_PASS}
    plans = {name + late: cuda.Plan(name, release=release) for name in names for late, release in when.items()}
    return {name: partial(cuda.kda_step, early=True, plan=plan) for name, plan in plans.items()}


def _check(arms: Mapping[str, Step], given: dict[str, Any], slots: torch.Tensor, case: Case) -> None:
    own = torch.arange(len(slots), device=slots.device)
    pools = {name: given[name][slots] for name in ("conv_pool", "state")}
    want = {name: pool.clone() for name, pool in pools.items()}
    expected = reference(**given | want, slots=own)
    for name, step in arms.items():
        got = {pool: t.clone() for pool, t in pools.items()}
        y = step(**given | got, slots=own)
        KDA_STEP.equality.check(y, expected if len(y) == len(expected) else expected[case.tokens - 1 :: case.tokens])
        error = (got["state"].double() - want["state"].double()).norm() / want["state"].double().norm()
        assert error < STATE_ERROR[case.state], f"{name}: state differs by {error:.1e}"
        assert torch.equal(got["conv_pool"], want["conv_pool"]), f"{name}: conv windows differ"


def _bench(device: torch.device, case: Case, variants: bool) -> ArmTimes:
    one_state = case.batch * case.heads * D * D * case.state.itemsize
    given, sets = step_inputs(device, case, max(LEAST_SETS, sets_for(one_state)))
    arms = _arms(device, case, variants)
    with held_to(f"kda_decode, {case}"):
        _check(arms, given, sets[0], case)
    return time_arms(
        "kda_decode",
        case.document(),
        {name: lambda slots, step=step: step(**given, slots=slots) for name, step in arms.items()},
        sets,
        device,
        least=dict.fromkeys(arms, Least.of(case.floor())),
        equality=KDA_STEP.equality.kind,
        calls=CALLS,
    )
