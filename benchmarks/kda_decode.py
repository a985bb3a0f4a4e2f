"""The fused KDA decode step: CUDA, Triton and the chain of separate operations, states cold in the L2, graph replay.

Sets of slots rotate over more than 330 MB; steps follow each other directly, as layers would without projections.
Prints no time for an arm that does not equal the chain of reference operations. About a minute for the default cases.

    python benchmarks/kda_decode.py                      # the documented cases
    python benchmarks/kda_decode.py --variants --cases 32x8 12x20 12x24    # every compiled variant, early and late
    python benchmarks/kda_decode.py --f-b --cases 12x8   # f_b inside against a product in front
    python benchmarks/kda_decode.py --tokens 4           # several tokens in one launch against as many launches
"""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from common import ROOT, append_row, measured, provenance

from anabranch.measure.timing import Stopwatch, interleave
from anabranch.ops.arithmetic import sigmoid
from anabranch.ops.conv.triton import conv
from anabranch.ops.kda_decode.triton import kda_decode
from anabranch.ops.kda_gate.reference import log_decay
from anabranch.ops.kda_step import cuda, triton
from anabranch.ops.kda_step.reference import kda_step as reference
from anabranch.ops.kda_step.spec import KDA_STEP, floor
from anabranch.ops.norm.triton import gated_rms_norm, l2_norm
from anabranch.ops.segments import Segments

CASES = (
    (12, 1),
    (12, 8),
    (12, 32),
    (12, 64),
    (12, 128),
    (32, 1),
    (32, 8),
    (32, 32),
    (96, 1),
    (96, 8),
    (96, 32),
    (96, 128),
)
SETS_BYTES = 330 << 20  # more than six times the L2
D, DEVICE = 128, torch.device("cuda")
Step = Callable[..., torch.Tensor]


def inputs(heads: int, batch: int, tokens: int, state: torch.dtype, f_b: bool) -> tuple[dict[str, Any], list]:
    """Arguments of a step, and the slots of each set that takes its turn."""

    def randn(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return (torch.randn(shape, device=DEVICE) * scale).to(dtype)

    width, rows = heads * D, batch * tokens
    sets = max(4, -(-SETS_BYTES // (batch * width * D * state.itemsize)))
    wide = randn(rows, 4 * width + D + heads + -(D + heads) % 16)
    pool = torch.empty(sets * batch, heads, D, D, device=DEVICE, dtype=state).normal_(std=0.1)
    given = {
        "qkv": wide[:, : 3 * width],
        "conv_pool": randn(sets * batch, 3, 3 * width),
        "conv_weight": randn(3 * width, 4, scale=0.3, dtype=torch.float32),
        "forget": wide[:, 4 * width : 4 * width + D] if f_b else randn(rows, width),
        "beta_logits": wide[:, 4 * width + D : 4 * width + D + heads],
        "gate": wide[:, 3 * width : 4 * width],
        "dt_bias": randn(width, scale=0.5, dtype=torch.float32),
        "a_log": randn(heads, scale=0.5, dtype=torch.float32),
        "lower_bound": -5.0,
        "norm_weight": 1 + randn(D, scale=0.1, dtype=torch.float32),
        "eps": 1e-5,
        "state": pool,
    }
    given |= {"f_b": randn(width, D, scale=0.1)} if f_b else {}
    return given, list(torch.randperm(sets * batch, device=DEVICE).view(sets, batch).unbind())


def chain(
    qkv, conv_pool, conv_weight, forget, beta_logits, gate, dt_bias, a_log, lower_bound, norm_weight, eps, slots, state
) -> torch.Tensor:
    """The layer's separate operations, as it runs them where there is no fused step."""
    heads = state.shape[1:3]
    mixed = conv(qkv, SINGLE[len(slots)], slots, conv_pool, conv_weight)
    q, k, v = (part.unflatten(-1, heads) for part in mixed.chunk(3, -1))
    g = log_decay(forget.unflatten(-1, heads), dt_bias, a_log, lower_bound)
    o = kda_decode(l2_norm(q), l2_norm(k), v, g, sigmoid(beta_logits.float()), slots, state)
    return gated_rms_norm(o, gate, norm_weight, eps)


SINGLE: dict[int, Segments] = {}


def product_first(step: Step, **given: Any) -> torch.Tensor:
    """f_b as a library product in front of the step."""
    f_b = given.pop("f_b")
    return step(**given | {"forget": torch.nn.functional.linear(given["forget"], f_b)})


def token_by_token(step: Step, tokens: int, **given: Any) -> torch.Tensor:
    """One launch a token."""
    names = ("qkv", "forget", "beta_logits", "gate")
    for token in range(tokens):
        y = step(**given | {name: given[name][token::tokens] for name in names})
    return y


def arms_of(heads: int, batch: int, state: torch.dtype, args: argparse.Namespace) -> dict[str, Step]:
    """Arms by name; the first is the one that the others are compared with."""
    early = partial(cuda.kda_step, early=True)
    if args.f_b:
        return {"f_b inside": early, "f_b in front": partial(product_first, early)}
    if args.tokens > 1:
        return {"one launch": early, "a launch each": partial(token_by_token, early, args.tokens)}
    chosen = cuda.choose(heads * batch, state)
    if args.variants:
        arms: dict[str, Step] = {f"chosen: {chosen.variant}": early}
        kind = "bf16" if state == torch.bfloat16 else "f32"
        for name in cuda.variants():
            if name.startswith(kind) and "_fb" not in name and "_many" not in name:
                for late in (False, True):
                    plan = cuda.Plan(name, late=late)
                    arms[f"{name}{' late' if late else ''}"] = partial(early, plan=plan)
        return arms
    plain = cuda.Plan(chosen.variant, chosen.prefetch, chained=False)
    return {
        "cuda": early,
        "cuda, no early reads": cuda.kda_step,
        "cuda, not chained": partial(cuda.kda_step, plan=plain),
        "triton": triton.kda_step,
        "chain": chain,
    }


def check(arms: Mapping[str, Step], given: dict[str, Any], slots: torch.Tensor, tokens: int) -> None:
    """Raise AssertionError unless every arm equals the chain of reference operations in the declared class."""
    own = torch.arange(len(slots), device=DEVICE)
    pools = {name: given[name][slots] for name in ("conv_pool", "state")}
    want = {name: pool.clone() for name, pool in pools.items()}
    expected = reference(**given | want, slots=own)
    for name, step in arms.items():
        got = {pool: t.clone() for pool, t in pools.items()}
        y = step(**given | got, slots=own)
        KDA_STEP.equality.check(y, expected if len(y) == len(expected) else expected[tokens - 1 :: tokens], name)
        error = (got["state"].double() - want["state"].double()).norm() / want["state"].double().norm()
        assert error < (4e-3 if given["state"].itemsize == 2 else 2e-4), f"{name}: state differs by {error:.1e}"
        assert torch.equal(got["conv_pool"], want["conv_pool"]), f"{name}: conv windows differ"


def bench(heads: int, batch: int, state: torch.dtype, args: argparse.Namespace, where: dict) -> None:
    given, sets = inputs(heads, batch, args.tokens, state, args.f_b)
    SINGLE[batch] = Segments.of([1] * batch, device=DEVICE)
    arms = arms_of(heads, batch, state, args)
    check(arms, given, sets[0], args.tokens)
    calls = len(sets) * -(-12 // len(sets))

    def rotate(step: Step) -> None:
        for i in range(calls):
            step(**given, slots=sets[i % len(sets)])

    watch = {name: partial(Stopwatch, partial(rotate, step), calls, DEVICE, True) for name, step in arms.items()}
    timed = interleave(watch, rounds=3, samples=5)
    least = floor(batch, heads, args.tokens, state.itemsize)
    case = {"heads": heads, "batch": batch, "state": str(state).removeprefix("torch."), "tokens": args.tokens}
    line = [f"H={heads:2d} B={batch:3d} A/A {timed.spread_pct:4.1f} %"]
    for name, times in timed.us.items():
        row = {"bench": "kda_decode", "case": case | {"f_b": args.f_b}, "arm": name, **where}
        row |= measured(times, least.bytes, least.flops)
        row |= {"aa_spread_pct": round(timed.spread_pct, 2), "equality": KDA_STEP.equality.kind}
        append_row(ROOT / "benchmarks/results/kda_decode.jsonl", row)
        line.append(f"{name} {row['us_median']:.2f} ({row['us_median'] / row['floor_us']:.2f}x)")
    print(("\n    " if args.variants else "  ").join(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=[f"{h}x{b}" for h, b in CASES], metavar="HEADSxBATCH")
    parser.add_argument("--state", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--f-b", action="store_true")
    parser.add_argument("--variants", action="store_true")
    args, where = parser.parse_args(), provenance()
    torch.manual_seed(0)
    with torch.inference_mode():
        for case in args.cases:
            heads, batch = (int(n) for n in case.split("x"))
            bench(heads, batch, getattr(torch, args.state), args, where)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
