"""One token's experts by products with a vector against the tiles, by CUDA-graph replay, arms in turn, weights cold.

Shape and weights are those of `experts.py`: four layers take turns, so that none stays in the second-level cache.
Arms named `router + ...` include the router in front, the others start on a choice made before. `--kernels` prints the
time of each launch, not started early; `--sweep` adds layouts that are not the default. A plan that changes a bit, or a
result outside the declared class, is refused before anything is timed.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from common import ROOT, append_row, measured, provenance
from experts import EXPERT_COUNT, INNER, LAYERS, SILU, TOP_K, WIDTH, Case, Layer, print_kernels

from anabranch.measure.timing import Stopwatch, interleave
from anabranch.ops.expert_ffn import gemv
from anabranch.ops.expert_ffn.plan import GemvPlan
from anabranch.ops.expert_ffn.spec import EXPERT_FFN

TOKENS = 1
Call = Callable[..., torch.Tensor]


def by_vector(case: Case, plan: GemvPlan, layer: Layer, routing: Any = None) -> torch.Tensor:
    weights, chosen = routing or case.route(case.x, layer.router, layer.bias, case.moe, layer.sync)
    return gemv.expert_ffn(case.x, weights, chosen, layer, SILU, layer.shared, plan)


def plans(sweep: bool) -> dict[str, GemvPlan]:
    """The default first, then one change at a time."""
    base = GemvPlan()
    found = {"gemv": base}
    if sweep:
        found |= {f"gemv warps {n}": replace(base, warps=n) for n in (4, 8, 16)}
        found["gemv down warps 9"] = replace(base, down_warps=9)
        found["gemv not chained"] = replace(base, chained=False)
    return found


def check(case: Case, found: dict[str, GemvPlan]) -> None:
    for layer, routing in zip(case.layers, case.routing, strict=True):
        want, first = case.chain(layer, routing), None
        for name, plan in found.items():
            got = by_vector(case, plan, layer, routing)
            EXPERT_FFN.equality.check(got, want, name)
            first = got if first is None else first
            assert torch.equal(got, first), f"{name}: other bits than the default"


def watch(case: Case, call: Call, router: bool) -> Stopwatch:
    def run() -> None:
        for _ in range(case.rounds):
            for layer, routing in zip(case.layers, case.routing, strict=True):
                call(layer, None if router else routing)

    return Stopwatch(run, case.rounds * LAYERS, torch.device("cuda"), graph=True)


def report(case: Case, options: argparse.Namespace, source: dict[str, Any]) -> None:
    found = plans(options.sweep)
    check(case, found)
    calls: dict[str, tuple[Call, bool]] = {"tiles": (case.together, False), "router + tiles": (case.together, True)}
    for name, plan in found.items():
        calls[name] = (partial(by_vector, case, plan), False)
        calls[f"router + {name}"] = (partial(by_vector, case, plan), True)
    timed = interleave({n: partial(watch, case, *call) for n, call in calls.items()}, rounds=options.rounds)
    flops = 6 * case.tokens * (TOP_K + 1) * INNER * WIDTH
    print(f"one token, A/A differ by {timed.spread_pct:.2f} %")
    for name, (_, router) in calls.items():
        row = measured(timed.us[name], case.floor_bytes(router), flops) | {"spread_pct": round(timed.spread_pct, 3)}
        shape = {"tokens": case.tokens, "experts": EXPERT_COUNT, "top_k": TOP_K, "inner": INNER, "width": WIDTH}
        shape["layers_rotated"] = LAYERS
        append_row(
            ROOT / "benchmarks/results/experts.jsonl",
            {"bench": "expert_gemv", "case": shape, "arm": name, **row, **source},
        )
        print(f"  {row['us_median']:8.2f} us  floor {row['floor_us']:7.1f}  {row['gbs']:6.0f} GB/s  {name}")
    if options.kernels:
        for name, plan in found.items():
            plain = partial(by_vector, case, replace(plan, chained=False))
            print_kernels(case, name, lambda layer, call=plain: call(layer, case.routing[case.layers.index(layer)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS, choices=[TOKENS], help="the kernels take one")
    parser.add_argument("--sweep", action="store_true", help="also time layouts that are not the default")
    parser.add_argument("--kernels", action="store_true", help="also print the time of each launch")
    parser.add_argument("--rounds", type=int, default=3, help="times that all arms take turns")
    options = parser.parse_args()
    torch.manual_seed(0)
    report(Case(options.tokens, [Layer() for _ in range(LAYERS)]), options, provenance())


if __name__ == "__main__":
    main()
