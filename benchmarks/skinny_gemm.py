"""Few-token products: our kernel, in the layout it chooses, against cuBLAS; `--sweep` times every legal layout.

Cold weights: each launch of the captured graph reads another copy, together more than the L2 cache. Arms take turns.
"""

import argparse
from dataclasses import asdict, replace
from statistics import median

import torch
import torch.nn.functional as F
from common import ROOT, append_row, measured, provenance, time_graph

from anabranch.ops.skinny_gemm import configs
from anabranch.ops.skinny_gemm.cuda import gemm_low_rank, linear, low_rank
from anabranch.ops.skinny_gemm.spec import SKINNY_GEMM, floor

SHAPES = {
    "k3 mla tp8": (3648, 7168),
    "k3 kda tp8": (6288, 7168),
    "k3 kda tp1": (49376, 7168),
    "k3 kda tp16": (3216, 7168),
    "k3 bfa": (144, 7168),
    "k3 o tp8": (7168, 1536),
    "k3 q_b tp8": (2304, 1536),
    "kl kda tp1": (12576, 2304),
    "kl kda tp8": (1808, 2304),
    "kl mla tp1": (6720, 2304),
    "kl o tp1": (2304, 4096),
    "kl shared": (2048, 2304),
}
# heads, hidden, low-rank sides
PROLOGUES = {
    "k3 tp8": (12, 7168, 1),
    "k3 tp16": (6, 7168, 1),
    "k3 tp4": (24, 7168, 1),
    "k3 tp1": (96, 7168, 1),
    "kl tp1": (32, 2304, 2),
    "kl tp4": (8, 2304, 2),
}
L2 = 120 << 20  # twice an H200's
LAUNCHES = 48  # of one captured graph, so that its own start is a small part of the time


def weights(rows: int, columns: int) -> list[torch.Tensor]:
    """Copies that together are more than the cache, at least four."""
    first = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
    return [first, *(first.clone() for _ in range(max(3, L2 // first.nbytes)))]


def arms(x, banks, options, samples=10):
    """Microseconds of each arm, all samples; two interleaved rounds."""
    rounds = -(-LAUNCHES // len(banks))

    def rotate(run):
        def all_launches():
            for _ in range(rounds):
                for w in banks:
                    run(x, w)

        return all_launches

    times = {name: [] for name in options}
    for _ in range(2):
        for name, run in options.items():
            times[name] += time_graph(rotate(run), rounds * len(banks), samples=samples)
    return times


def spread(times):
    """Difference between the two rounds, in percent."""
    half = len(times) // 2
    return round(abs(median(times[:half]) - median(times[half:])) / median(times) * 100, 2)


def one_shape(name, m, sweep, about):
    rows, columns = SHAPES[name]
    x, banks = torch.randn(m, columns, device="cuda", dtype=torch.bfloat16), weights(rows, columns)
    reference = torch.cat([x.double() @ part.double().mT for part in banks[0].split(8192)], 1)
    chosen = configs.choose(m, rows, columns)
    SKINNY_GEMM.equality.check(linear(x, banks[0], chosen), reference.to(x.dtype))
    options = {"cublas": F.linear, "skinny": lambda x, w: linear(x, w, chosen)}
    layouts = {"skinny": chosen}
    if sweep:
        for i, config in enumerate(configs.candidates(m, rows, columns)):
            for ahead in (2, 4):
                arm = f"{i}.{ahead}"
                layouts[arm] = replace(config, ahead=ahead)
                options[arm] = lambda x, w, c=layouts[arm]: linear(x, w, c)
    moved = floor(m, rows, columns)
    times = arms(x, banks, options, 5 if sweep else 10)
    ranked = sorted(times, key=lambda arm: median(times[arm]))
    for arm in ("cublas", "skinny", *(ranked[:3] if sweep else ())):
        print(f"{name:12s} M={m:3d} {arm:8s} {median(times[arm]):8.2f} us  spread {spread(times[arm])} %", end="")
        print("  " + str(layouts[arm]) if sweep and arm in layouts else "")
    for arm in ("cublas", "skinny"):
        case = {"name": name, "m": m, "n": rows, "k": columns}
        fields = measured(times[arm], moved.bytes, moved.flops) | {"aa_spread_pct": spread(times[arm])}
        layout = asdict(layouts[arm]) if arm in layouts else None
        append_row(
            ROOT / "benchmarks/results/skinny_gemm.jsonl",
            {
                "bench": "skinny_gemm",
                "case": case,
                "arm": arm,
                "layout": layout,
                **fields,
                "equality": "checked",
                **about,
            },
        )


def one_prologue(name, m, sweep, about):
    heads, columns, sides = PROLOGUES[name]
    row0 = heads * 128 * (5 - sides)
    rows = row0 + -(-(128 * sides + heads) // 16) * 16
    x, banks = torch.randn(m, columns, device="cuda", dtype=torch.bfloat16), weights(rows, columns)
    second = {w.data_ptr(): torch.randn(sides, heads * 128, 128, device="cuda", dtype=torch.bfloat16) for w in banks}
    syncs = {w.data_ptr(): torch.zeros(2, dtype=torch.int32, device="cuda") for w in banks}

    def ranks(y):
        return y[:, row0 : row0 + 128 * sides].unflatten(-1, (sides, 128)).transpose(0, 1)

    def library(x, w):
        if sides == 1:
            return F.linear(F.linear(x, w)[:, row0 : row0 + 128], second[w.data_ptr()][0])
        return torch.bmm(ranks(F.linear(x, w)), second[w.data_ptr()].mT)

    options = {
        "cublas whole": library,
        "cublas + low rank": lambda x, w: low_rank(ranks(F.linear(x, w)), second[w.data_ptr()]),
        "skinny + cublas": lambda x, w: torch.bmm(ranks(linear(x, w)), second[w.data_ptr()].mT),
        "two launches": lambda x, w: low_rank(ranks(linear(x, w)), second[w.data_ptr()]),
    }
    config = configs.choose_low_rank(m, rows, columns, row0)
    layouts = {} if config is None else {"fused": config}
    if sweep and config is not None:
        layouts |= {
            f"{low}{ahead}": replace(config, low_ahead=low, ahead=ahead) for low in (0, 1, 2) for ahead in (2, 4)
        }
    for arm, layout in layouts.items():
        options[arm] = lambda x, w, c=layout: gemm_low_rank(x, w, row0, second[w.data_ptr()], syncs[w.data_ptr()], c)
    times = arms(x, banks, options)
    moved = floor(m, rows, columns).bytes + sides * floor(m, heads * 128, 128).bytes
    for arm in options:
        print(f"prologue {name:8s} M={m:3d} {arm:14s} {median(times[arm]):8.2f} us  spread {spread(times[arm])} %")
        append_row(
            ROOT / "benchmarks/results/skinny_gemm.jsonl",
            {
                "bench": "kda_prologue_launch",
                "case": {"name": name, "m": m, "heads": heads, "k": columns},
                "arm": arm,
                **measured(times[arm], moved),
                "aa_spread_pct": spread(times[arm]),
                **about,
            },
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--prologues", nargs="*", default=list(PROLOGUES))
    parser.add_argument("--ms", type=int, nargs="*", default=[1, 8, 16, 32, 64, 128])
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    about = provenance()
    with torch.inference_mode():
        for name in args.prologues:
            for m in args.ms:
                one_prologue(name, m, args.sweep, about)
        for name in args.shapes:
            for m in args.ms:
                one_shape(name, m, args.sweep, about)


if __name__ == "__main__":
    main()
