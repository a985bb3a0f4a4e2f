"""Projection paths of one layer at true shapes, cold weights, CUDA-graph replay, arms interleaved, A/A first.

Refuses to print a ratio when a merged path does not equal the separate one in the declared class.
"""

import argparse
from functools import partial
from statistics import median

import torch
from common import ROOT, append_row, floor_us, provenance, time_graph

from anabranch.config.fusion import FusionConfig
from anabranch.config.hf import load_model_config
from anabranch.config.model import ModelConfig
from anabranch.fusion.plan import make_plan
from anabranch.fusion.prologue import EQUALITY, Path, kda_paths, mla_paths
from anabranch.layers.build import Build
from anabranch.layers.kda import KdaLayer
from anabranch.layers.mla import MlaLayer
from anabranch.ops.linear.spec import floor as linear_floor
from anabranch.ops.registry import select
from anabranch.parallel.collectives import SingleRank
from anabranch.parallel.layout import Layout

CASES = {
    "k3-tp8": ("kimi_k3_config.json", Layout(tp=8)),
    "k3-dp-attention": ("kimi_k3_config.json", Layout(tp=16, dp_attention=16, ep=16)),
    "kl-tp1": ("kimi_linear_48b_config.json", Layout()),
}
SETS_BYTES = 400 << 20  # weight sets rotate over more than six times the L2
ROWS = (1, 8, 16, 32, 64, 128, 512)


def build(config: ModelConfig, layout: Layout) -> Build:
    device = torch.device("cuda")
    return Build(
        config=config,
        parallel=layout.rank(0),
        plan=make_plan(config, FusionConfig(), "bfloat16"),
        ops=select(config, device, wishes={"linear": "reference", "batched_linear": "reference"}).ops,
        comm=SingleRank(),
        dtype=torch.bfloat16,
        device=device,
    )


def filled(layer: torch.nn.Module) -> torch.nn.Module:
    for p in layer.parameters():
        p.normal_(std=p.shape[-1] ** -0.5)
    return layer


def same(path: Path, separate: Path, weights: object, x: torch.Tensor) -> str:
    got, want = path.run(weights, x), separate.run(weights, x)
    for name in want.__slots__:
        a, b = getattr(got, name), getattr(want, name)
        if b is not None:
            EQUALITY.check(a.contiguous(), b.contiguous(), f"{path.name} {name}")
    return EQUALITY.kind


def rotate(path: Path, layers: list, x: torch.Tensor, calls: int) -> None:
    """`calls` prologues, each on the next layer's weights, so that none is in the cache."""
    for i in range(calls):
        path.run(layers[i % len(layers)].prologue.weights, x)


def bench(case: str, kind: str, config: ModelConfig, layout: Layout, where: dict, rows: tuple[int, ...]) -> None:
    make, paths = (KdaLayer, kda_paths(config.kda.full_rank_gate)) if kind == "kda" else (MlaLayer, mla_paths(True))
    first = filled(make(build(config, layout)))
    buffers = [first.in_proj.buffer, *([first.second.buffer] if kind == "kda" else [])]
    read = sum(b.numel() * 2 for b in buffers)
    layers = [first] + [filled(make(build(config, layout))) for _ in range(max(1, SETS_BYTES // read))]
    for m in rows:
        x = torch.randn(m, config.hidden_size, device="cuda", dtype=torch.bfloat16)
        equality = {name: same(path, paths["separate"], first.prologue.weights, x) for name, path in paths.items()}
        calls = len(layers) * max(1, 40 // len(layers))
        times: dict[str, list[float]] = {name: [] for name in (*paths, "separate again")}
        for _ in range(3):  # arms in turn, so that drift meets all of them
            for name in times:
                run = partial(rotate, paths[name.removesuffix(" again")], layers, x, calls)
                times[name] += time_graph(run, calls, samples=7)
        base, again = median(times["separate"]), median(times["separate again"])
        spread = abs(base - again) / base * 100
        floors = [linear_floor(m, *b.shape) for b in buffers]
        floor = floor_us(sum(f.bytes for f in floors), sum(f.flops for f in floors))
        line = [f"{case} {kind} M={m:4d} A/A {spread:4.1f} %"]
        for name in paths:
            us = median(times[name])
            line.append(f"{name} {us:7.1f} ({us / floor:4.2f}x)")
            row = {"bench": "prologue", "case": {"layout": case, "kind": kind, "m": m}, "arm": name, **where}
            row |= {"us": times[name], "us_median": us, "floor_us": floor, "gbs": read / us / 1e3}
            row |= {"gemms": paths[name].gemms, "aa_spread_pct": spread, "equality": equality[name]}
            append_row(ROOT / "benchmarks/results/prologue.jsonl", row)
        print("  ".join(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    args = parser.parse_args()
    where = provenance()
    with torch.inference_mode():
        for case in args.cases:
            file, layout = CASES[case]
            config = load_model_config(ROOT / "tests/data/configs" / file)
            for kind in ("kda", "mla") if config.mla.output_gate else ("kda",):
                bench(case, kind, config, layout, where, tuple(args.rows))
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
