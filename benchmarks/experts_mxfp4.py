"""Routed MXFP4 experts at the shapes of Kimi-K3's ranks and of Kimi-Linear, by CUDA-graph replay.

A time is that of arranging x, sorting the pairs, both products and the weighted sum of one layer. Two layers' weights
take turns and each is more than the second-level cache holds. The floor counts the experts that the drawn tokens touch.
Arm `triton` runs the plan of the tables and, in a sweep, plans that change one launch of it, so what they gain or lose
is that launch's; arm `cuda` runs the kernels for few pairs with tiles of T8 or T16 pairs, the rule's first.
What has other bits than the first plan is refused, and nothing is timed before the reference agrees.
"""

import argparse
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch
from common import ROOT, append_row, measured, provenance, time_graph
from experts import named_plan, plan_name

from anabranch.config.model import ActivationConfig
from anabranch.layers.experts import Mxfp4Experts
from anabranch.ops.expert_sum.triton import expert_sum
from anabranch.ops.experts import reference
from anabranch.ops.experts.plan import Plan, Tile, choose_plan
from anabranch.ops.experts.spec import EXPERTS
from anabranch.ops.experts.triton import routed_experts
from anabranch.ops.mxfp4 import cuda

LAYERS = 2
RESULTS = ROOT / "benchmarks/results/experts_mxfp4.jsonl"
SITU, SILU = ActivationConfig(name="situ", beta=4.0, linear_beta=25.0), ActivationConfig(name="silu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What one rank computes: `count` of `total` experts for `tokens` rows of `top_k` choices."""

    tokens: int
    count: int
    total: int
    inner: int
    width: int
    top_k: int
    activation: ActivationConfig


CASES = {
    "k3-tp8": Shape(tokens=32, count=896, total=896, inner=384, width=3584, top_k=16, activation=SITU),
    "k3-tp8-8": Shape(tokens=8, count=896, total=896, inner=384, width=3584, top_k=16, activation=SITU),
    "k3-dep16": Shape(tokens=512, count=56, total=896, inner=3072, width=3584, top_k=16, activation=SITU),
    "kl-tp1": Shape(tokens=128, count=256, total=256, inner=1024, width=2304, top_k=8, activation=SILU),
    "kl-tp1-32": Shape(tokens=32, count=256, total=256, inner=1024, width=2304, top_k=8, activation=SILU),
}
Arm = Plan | int  # of Triton, or pairs of a tile of the CUDA kernels


class Layer:
    """One layer's experts: every code, under scales that keep sums about one."""

    gate_up, down, dtype = Mxfp4Experts.gate_up, Mxfp4Experts.down, torch.bfloat16

    def __init__(self, shape: Shape, device: str = "cuda") -> None:
        self.first, self.count, self.total = 0, shape.count, shape.total

        def codes(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
            packed = torch.empty(shape.count, rows, columns // 2, dtype=torch.uint8, device=device)
            scale = torch.empty(shape.count, rows, columns // 32, dtype=torch.uint8, device=device)
            return packed.random_(0, 256), scale.random_(118, 122)

        self.w13_packed, self.w13_scale = codes(2 * shape.inner, shape.width)
        self.w2_packed, self.w2_scale = codes(shape.width, shape.inner)


class Case:
    """The inputs of one shape; every layer gets a choice of its own."""

    def __init__(self, shape: Shape, device: str = "cuda") -> None:
        self.shape, on_meta = shape, device == "meta"
        self.layers = [Layer(shape, device) for _ in range(1 if on_meta else LAYERS)]
        self.x = torch.empty(shape.tokens, shape.width, dtype=torch.bfloat16, device=device).normal_(0, 1)
        scores = (torch.empty if on_meta else torch.rand)(LAYERS, shape.tokens, shape.total, device=device)
        self.chosen = scores.topk(shape.top_k, -1).indices
        self.weights = torch.full((shape.tokens, shape.top_k), 1 / shape.top_k, device=device)

    def run(self, arm: Arm, i: int = 0) -> torch.Tensor:
        x, chosen, layer, activation = self.x, self.chosen[i], self.layers[i], self.shape.activation
        if isinstance(arm, Plan):
            return routed_experts(x, self.weights, chosen, layer, activation, arm)
        y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        out = cuda.expert_products(x, chosen, layer, activation, arm)
        expert_sum(out, self.weights, chosen, layer.first, layer.count, y)
        return y

    def check(self, plan: Plan) -> torch.Tensor:
        """What this plan makes of the first layer, which the reference must confirm on some tokens."""
        n, got = min(self.shape.tokens, 8), self.run(plan)
        some = self.x[:n], self.weights[:n], self.chosen[0, :n]
        want = reference.routed_experts(*some, self.layers[0], self.shape.activation)
        EXPERTS.equality.check(got[:n].bfloat16(), want.bfloat16())
        return got

    def floor_bytes(self) -> float:
        s = self.shape
        touched = sum(chosen[chosen < s.count].unique().numel() for chosen in self.chosen) / LAYERS
        return touched * 3 * s.inner * s.width * (1 / 2 + 1 / 32) + s.tokens * s.width * (2 + 4)

    def measure(self, arm: Arm, rounds: int = 4) -> dict[str, Any]:
        def run() -> None:
            for _ in range(rounds):
                for i in range(LAYERS):
                    self.run(arm, i)

        s = self.shape
        flops = 6 * s.tokens * s.top_k * s.count / s.total * s.inner * s.width
        return measured(time_graph(run, rounds * LAYERS, samples=10), self.floor_bytes(), flops)


def candidates(shape: Shape) -> Iterator[Plan]:
    """The tables' plan, then plans that change one launch of it, then one with tiles of other tokens."""
    base = choose_plan(shape.tokens, shape.top_k, shape.total, torch.bfloat16, fp4=True)
    yield base
    T = base.T
    for R, warps, stages, stacked in ((32, 4, 6, False), (64, 4, 3, False), (64, 4, 4, True), (128, 8, 4, False)):
        tile = Tile(T=T, R=R, K=128, num_warps=warps, num_stages=stages, stacked=stacked)
        yield replace(base, wide=tile)
    for R, warps, stages in ((64, 4, 2), (128, 4, 3), (128, 8, 4)):
        yield replace(base, narrow=Tile(T=T, R=R, K=128, num_warps=warps, num_stages=stages))
    other = 16 if T == 32 else 32
    yield replace(base, wide=replace(base.wide, T=other), narrow=replace(base.narrow, T=other))


def compile_plan(shape: Shape, plan: Plan) -> None:
    """In a process of its own: nothing is launched, the binaries land in Triton's cache."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run
    JITFunction.run = lambda self, *args, **options: run(self, *args, **(options | {"warmup": True}))
    Case(shape, "meta").run(plan)


def compile_all(jobs: list[tuple[Shape, Plan]]) -> None:
    workers = min(len(jobs), max(1, (os.cpu_count() or 1) - 2))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(compile_plan, *job) for job in jobs]:
            done.result()


def report(name: str, plans: list[Plan], tiles: list[int], source: dict[str, Any]) -> None:
    case = Case(CASES[name])
    want = case.check(plans[0])
    shape = {field: getattr(case.shape, field) for field in ("tokens", "count", "total", "inner", "width", "top_k")}
    for run in (*plans, *tiles):
        arm, plan = ("triton", plan_name(run)) if isinstance(run, Plan) else ("cuda", f"T{run}")
        if not torch.equal(case.run(run), want):
            print(f"refused: {arm} {plan} changes bits at {name}")
            continue
        times = case.measure(run)
        row = {"bench": "experts_mxfp4", "case": {"name": name, **shape, "layers_rotated": LAYERS}, "arm": arm}
        append_row(RESULTS, row | {"plan": plan} | times | source)
        us, floor = times["us_median"], times["floor_us"]
        print(f"{name:>9} {us:9.1f} {floor:9.1f} {us / floor:6.2f} {times['gbs']:7.0f}  {arm} {plan}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--sweep", action="store_true", help="time other plans beside that of the tables")
    parser.add_argument("--plans", type=named_plan, nargs="+", default=[], help="plans to time, as a sweep prints them")
    options = parser.parse_args()
    torch.manual_seed(0)
    plans = {}
    for name in options.cases:
        found = list(candidates(CASES[name]))
        plans[name] = list(dict.fromkeys([*found[: None if options.sweep else 1], *options.plans]))
    compile_all([(CASES[name], plan) for name in options.cases for plan in plans[name]])
    source = provenance()
    print(f"{'case':>9} {'us':>9} {'floor':>9} {'ratio':>6} {'GB/s':>7}  arm and plan")
    for name in options.cases:
        few = CASES[name].tokens * CASES[name].top_k / CASES[name].total <= cuda.FEW
        report(name, plans[name], [8, 16] if few else [16, 8], source)


if __name__ == "__main__":
    main()
