"""The mixture-of-experts FFN at the Kimi-Linear shape, by CUDA-graph replay, router included.

Arms: `chain` runs an operation at a time, `together` the common launches, `experts` those without the router, above 64
tokens `triton` the same on Triton alone, and from 1024 `matmul` two plain products of as many rows as there are pairs.
Four layers' weights take turns, so that none stays in the second-level cache. The floor counts the experts that the
drawn tokens really touch. `--kernels` prints where the time goes; `--sweep` also times other plans, `--plans` only
those named, as a sweep prints them: `T16 R32K128w4s8 R64K128w4s3`, tiles of gate-up and of down (`x` behind one:
stacked), then what is not at its default. A result that differs from the chain's by a bit is refused.
"""

import argparse
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch
from common import ROOT, append_row, measured, provenance, time_graph

from anabranch.config.hf import load_model_config
from anabranch.config.model import ActivationConfig
from anabranch.layers.experts import PlainExperts
from anabranch.measure.timing import READ_BYTES_PER_S
from anabranch.ops.experts import reference
from anabranch.ops.experts.plan import RIDER_TOKENS, Plan, Tile, choose_plan
from anabranch.ops.experts.spec import EXPERTS

EXPERT_COUNT, INNER, WIDTH, TOP_K, LAYERS = 256, 1024, 2304, 8, 4
TOKENS = (1, 8, 32, 64, 128, 256, 512, 2048, 8192)
SHARED_LIMIT = 232_448
# fields of a plan that its name says behind its tiles
OPTIONS = ("few", "tail")
SILU = ActivationConfig(name="silu")


class Layer:
    """One layer's weights in bf16, as `MoeFfn` holds them."""

    first, count, total = 0, EXPERT_COUNT, EXPERT_COUNT
    gate_up, down = PlainExperts.gate_up, PlainExperts.down

    def __init__(self, device: str = "cuda") -> None:
        def weight(*shape: int) -> torch.Tensor:
            made = torch.empty(shape, dtype=torch.bfloat16, device=device)
            return made if device == "meta" else made.normal_(0, 0.02)

        self.w13, self.w2 = weight(EXPERT_COUNT, 2 * INNER, WIDTH), weight(EXPERT_COUNT, WIDTH, INNER)
        self.router, self.bias = weight(EXPERT_COUNT, WIDTH), torch.zeros(EXPERT_COUNT, device=device)
        self.shared = weight(2 * INNER, WIDTH), weight(WIDTH, INNER)
        self.sync = torch.zeros(1, dtype=torch.int32, device=device)


class Case:
    """The inputs of one token count; every layer's router sees other weights, so it chooses other experts."""

    def __init__(self, tokens: int, layers: list[Layer], device: str = "cuda") -> None:
        from anabranch.ops.router.triton import route

        self.tokens, self.layers, self.route = tokens, layers, route
        config = load_model_config(ROOT / "tests/data/configs/kimi_linear_48b_config.json")
        assert config.moe is not None
        self.moe = config.moe
        make = torch.empty if device == "meta" else torch.randn
        self.x = make(tokens, WIDTH, dtype=torch.bfloat16, device=device)
        self.routing = [route(self.x, layer.router, layer.bias, self.moe) for layer in layers]
        self.rounds = 8 if tokens <= 128 else 1
        # a matrix of one value would draw less power than real ones
        self.rows = make(tokens * (TOP_K + 1), WIDTH, dtype=torch.bfloat16, device=device) if tokens >= 1024 else None

    def chain(self, layer: Layer, routing: Any = None) -> torch.Tensor:
        from anabranch.ops.experts.triton import routed_experts
        from anabranch.ops.glu.triton import glu
        from anabranch.ops.linear.skinny import linear

        weights, chosen = routing or self.route(self.x, layer.router, layer.bias, self.moe)
        routed = routed_experts(self.x, weights, chosen, layer, SILU).bfloat16()
        return routed + linear(glu(linear(self.x, layer.shared[0]), SILU), layer.shared[1])

    def together(self, layer: Layer, routing: Any = None, plan: Plan | None = None) -> torch.Tensor:
        from anabranch.ops.expert_ffn.triton import expert_ffn
        from anabranch.ops.linear.skinny import linear

        routing = routing or self.route(self.x, layer.router, layer.bias, self.moe, layer.sync)
        return expert_ffn(self.x, *routing, layer, SILU, layer.shared, linear, plan=plan)

    def matmul(self, layer: Layer, routing: Any = None) -> torch.Tensor:
        """As many products of plain matrices as the routed and the shared experts have."""
        assert self.rows is not None
        torch.matmul(self.rows, layer.w13[0].T)
        return torch.matmul(self.rows.view(-1)[: len(self.rows) * INNER].view(-1, INNER), layer.w2[0].T)

    def floor_bytes(self, router: bool) -> float:
        touched = sum(chosen.unique().numel() for _, chosen in self.routing) / len(self.routing)
        weights = (touched + 1) * 3 * INNER * WIDTH + (EXPERT_COUNT * WIDTH if router else 0)
        return 2.0 * (weights + 2 * self.tokens * WIDTH)

    def measure(self, call: Callable[[Layer, Any], torch.Tensor], router: bool) -> dict[str, Any]:
        def run() -> None:
            for _ in range(self.rounds):
                for layer, routing in zip(self.layers, self.routing, strict=True):
                    call(layer, None if router else routing)

        flops = 6 * self.tokens * (TOP_K + 1) * INNER * WIDTH
        times = measured(time_graph(run, self.rounds * LAYERS), self.floor_bytes(router), flops)
        return times | {"tflops": round(flops / times["us_median"] / 1e6, 1)}

    def check(self) -> None:
        """No time without a right result: the first tokens against the reference, and all against the chain."""
        n, (weights, chosen) = min(self.tokens, 64), self.routing[0]
        from anabranch.ops.experts.triton import routed_experts

        got = routed_experts(self.x, weights, chosen, self.layers[0], SILU)[:n]
        want = reference.routed_experts(self.x[:n], weights[:n], chosen[:n], self.layers[0], SILU)
        EXPERTS.equality.check(got.bfloat16(), want.bfloat16())
        for layer in self.layers:
            assert torch.equal(self.together(layer), self.chain(layer)), f"{self.tokens} tokens: other bits than chain"


def decode_plans(tokens: int) -> Iterator[Plan]:
    """One launch changes at a time."""
    base = choose_plan(tokens, TOP_K, EXPERT_COUNT, torch.bfloat16)
    T = base.T
    for R, K, stages in product((32, 64), (64, 128, 256), (2, 3, 4, 6, 8)):
        if 60_000 < (2 * R + T) * K * 2 * stages <= SHARED_LIMIT:
            yield replace(base, wide=Tile(T=T, R=R, K=K, num_stages=stages))
    for R, K, stages in product((64, 128), (64, 128, 256), (2, 3, 4, 6, 8)):
        if 40_000 < (R + T) * K * 2 * stages <= SHARED_LIMIT:
            yield replace(base, narrow=Tile(T=T, R=R, K=K, num_stages=stages))
    if 1 < tokens <= T:
        yield replace(base, few=0)


def plan_name(plan: Plan) -> str:
    tiles = [f"R{t.R}K{t.K}w{t.num_warps}s{t.num_stages}" + "x" * t.stacked for t in (plan.wide, plan.narrow)]
    return " ".join([f"T{plan.T}", *tiles, *(f"{field}{getattr(plan, field)}" for field in OPTIONS)])


def named_plan(name: str) -> Plan:
    """The inverse of `plan_name`; what is not named has its default. ValueError unless it is a plan."""
    found = re.fullmatch(r"T(\d+)((?: R\d+K\d+w\d+s\d+x?){2})((?: [a-z]+\d+)*)", name)
    rest = dict(re.findall(r" ([a-z]+)(\d+)", found[3])) if found else {}
    if not found or not rest.keys() <= set(OPTIONS):
        raise ValueError(f"{name!r} is no plan; one is like 'T16 R32K128w4s8 R64K128w4s3 few16', with {list(OPTIONS)}")
    wide, narrow = (
        Tile(T=int(found[1]), R=int(R), K=int(K), num_warps=int(w), num_stages=int(s), stacked=x == "x")
        for R, K, w, s, x in re.findall(r"R(\d+)K(\d+)w(\d+)s(\d+)(x?)", found[2])
    )
    return Plan(wide=wide, narrow=narrow, **{field: int(value) for field, value in rest.items()})


def prefill_plans(tokens: int) -> Iterator[Plan]:
    """Tiles about as large as a run of pairs, with what can be done about runs that do not fill them."""
    base, mean = choose_plan(tokens, TOP_K, EXPERT_COUNT, torch.bfloat16), tokens * TOP_K / EXPERT_COUNT
    yield base
    for T, R, warps, stages in ((64, 64, 4, 4), (64, 128, 8, 4), (128, 64, 4, 3), (128, 128, 8, 4), (256, 64, 8, 4)):
        if not mean / 2 <= T <= 2 * mean:
            continue
        wide = Tile(T=T, R=R, K=64, num_warps=warps, num_stages=stages, stacked=True)
        plain = Plan(wide=wide, narrow=Tile(T=T, R=2 * R, K=64, num_warps=warps, num_stages=stages))
        yield plain
        yield from (replace(plain, tail=tail) for tail in (16, 32))
        if warps == 8:
            yield replace(plain, wide=replace(wide, num_stages=3), narrow=replace(plain.narrow, num_stages=3), tail=32)


def plans(tokens: int, options: argparse.Namespace) -> list[Plan]:
    found = list(decode_plans(tokens) if tokens <= 64 else prefill_plans(tokens)) if options.sweep else []
    return list(dict.fromkeys([*options.plans, *found]))


def compile_plan(tokens: int, plan: Plan) -> None:
    """In a process of its own: nothing is launched, the binaries land in Triton's cache."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run
    JITFunction.run = lambda self, *args, **options: run(self, *args, **(options | {"warmup": True}))
    layer = Layer("meta")
    case = Case(tokens, [layer], "meta")
    case.together(layer, case.routing[0], plan)


def compile_all(jobs: list[tuple[int, Plan]]) -> None:
    workers = min(len(jobs), max(1, (os.cpu_count() or 1) - 2))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(compile_plan, *job) for job in jobs]:
            done.result()


def sweep(case: Case, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """(arm, timing) of each plan, after its bits were compared with those of the chain."""
    want = case.chain(case.layers[0], case.routing[0])
    for plan in plans(case.tokens, options):
        name, call = plan_name(plan), partial(case.together, plan=plan)
        if not torch.equal(call(case.layers[0], case.routing[0]), want):
            print(f"refused: {name} changes bits at {case.tokens} tokens")
            continue
        if options.kernels and plan in options.plans:
            early_starts(False)
            print_kernels(case, name, call)
            early_starts(True)
        yield name, case.measure(call, False)


def print_kernels(case: Case, arm: str, call: Callable[[Layer], torch.Tensor]) -> None:
    """Microseconds a layer by kernel, from the profiler over a graph; early starts are off, or waiting would count."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in case.layers:
            call(layer)
    graph.replay()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type == torch.profiler.DeviceType.CUDA:
            spent[event.name[:60]] += event.device_time / (10 * LAYERS)
    print(f"  {case.tokens} tokens, {arm}: " + ", ".join(f"{n} {us:.2f}" for n, us in spent.most_common(12)))


def early_starts(on: bool) -> None:
    """Whether the kernels of this FFN may take their places while the one before runs."""
    from anabranch.ops import early
    from anabranch.ops.expert_sum import triton as expert_sum
    from anabranch.ops.experts import tiles
    from anabranch.ops.experts import triton as experts
    from anabranch.ops.router import triton as router

    for module in (expert_sum, experts, router, tiles):
        module.__dict__["early_launch"] = early.early_launch if on else lambda: {"EARLY": False}


def report(case: Case, options: argparse.Namespace, source: dict[str, Any]) -> None:
    calls = {"chain": (case.chain, True), "together": (case.together, True), "experts": (case.together, False)}
    if case.tokens > RIDER_TOKENS:  # a plan that is asked for keeps Triton
        plan = choose_plan(case.tokens, TOP_K, EXPERT_COUNT, torch.bfloat16)
        calls["triton"] = (partial(case.together, plan=plan), False)
    if case.rows is not None:
        calls["matmul"] = (case.matmul, False)
    arms = [(name, case.measure(call, router)) for name, (call, router) in calls.items()]
    always = len(arms) + options.kernels + len(options.plans)
    if options.kernels:
        early_starts(False)
        arms.append(("together, no early start", case.measure(case.together, True)))
        for arm in ("chain", "together"):
            print_kernels(case, arm, calls[arm][0])
        early_starts(True)
    if options.sweep or options.plans:
        arms += sorted(sweep(case, options), key=lambda arm: arm[1]["us_median"])
    for arm, times in arms:
        shape = {"tokens": case.tokens, "experts": EXPERT_COUNT, "top_k": TOP_K, "inner": INNER, "width": WIDTH}
        row = {"bench": "expert_ffn", "case": shape | {"layers_rotated": LAYERS}, "arm": arm, **times, **source}
        append_row(ROOT / "benchmarks/results/experts.jsonl", row)
    for arm, times in arms[: always + options.show]:
        us, floor = times["us_median"], times["floor_us"]
        read = times["gbs"] * us / READ_BYTES_PER_S * 1e9
        speed = f"{times['gbs']:7.0f} {times['tflops']:7.0f}"
        print(f"{case.tokens:7} {us:9.2f} {floor:9.1f} {read:9.1f} {us / floor:6.2f} {speed}  {arm}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--sweep", action="store_true", help="also time other plans")
    parser.add_argument("--plans", type=named_plan, nargs="+", default=[], help="plans to time, by name")
    parser.add_argument("--kernels", action="store_true", help="also print the time of every kernel")
    parser.add_argument("--show", type=int, default=12, help="plans of a sweep to print, fastest first")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.sweep or options.plans:
        compile_all([(tokens, plan) for tokens in options.tokens for plan in plans(tokens, options)])
    layers, source = [Layer() for _ in range(LAYERS)], provenance()
    print(f"{'tokens':>7} {'us':>9} {'floor':>9} {'read':>9} {'ratio':>6} {'GB/s':>7} {'TFLOP/s':>7}  arm")
    for tokens in options.tokens:
        case = Case(tokens, layers)
        case.check()
        report(case, options, source)


if __name__ == "__main__":
    main()
