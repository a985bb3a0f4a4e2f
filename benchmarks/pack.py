"""q, k, v and beta of a prompt made dense: one packing launch against four ordinary copies. Graph replay, A/A first.

The shape of Kimi-K3's prefill, [1, T, heads, 128] slices of a token-major convolution; bits are compared before timing.
"""

import argparse
from functools import partial

import torch
from common import ROOT, append_row, measured, provenance

from anabranch.measure.timing import Stopwatch, interleave
from anabranch.ops.pack import reference, triton
from anabranch.ops.pack.spec import PACK, floor

CASES = ("96x16384", "12x16384", "96x4096", "12x4096", "96x1024")
COLD_BYTES = 330 << 20  # inputs rotate over more than six times the L2
DEVICE = torch.device("cuda")


def projections(heads: int, tokens: int) -> tuple[torch.Tensor, ...]:
    """Strided q, k, v and beta."""
    width = heads * 128
    mixed = torch.randn(1, tokens, 3 * width, device=DEVICE).bfloat16()
    beta = torch.randn(1, tokens, 128 + heads + -heads % 16, device=DEVICE).bfloat16()[..., 128 : 128 + heads]
    return (*(part.unflatten(-1, (heads, 128)) for part in mixed.split(width, -1)), beta)


def bench(heads: int, tokens: int, where: dict) -> None:
    least = floor(projections(heads, tokens))
    sets = [projections(heads, tokens) for _ in range(max(1, -(-COLD_BYTES * 2 // least.bytes)))]
    for got, want in zip(triton.pack(sets[0]), sets[0], strict=True):
        PACK.equality.check(got, want)
    calls = len(sets) * -(-4 // len(sets))

    def rotate(pack) -> None:
        for i in range(calls):
            pack(sets[i % len(sets)])

    arms = {"pack": triton.pack, "four copies": reference.pack}
    watches = {name: partial(Stopwatch, partial(rotate, arm), calls, DEVICE, True) for name, arm in arms.items()}
    timed = interleave(watches, rounds=3, samples=5)
    line = [f"H={heads} T={tokens} A/A {timed.spread_pct:.1f} % floor {least.bytes / 4.3e6:.0f}"]
    for name, times in timed.us.items():
        row = {"bench": "pack", "case": {"heads": heads, "tokens": tokens, "dtype": "bfloat16"}, "arm": name, **where}
        row |= measured(times, least.bytes)
        row |= {"aa_spread_pct": round(timed.spread_pct, 2), "equality": PACK.equality.kind}
        append_row(ROOT / "benchmarks/results/pack.jsonl", row)
        line.append(f"{name} {row['us_median']:.1f} ({row['us_median'] / row['floor_us']:.2f}x)")
    print("  ".join(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=list(CASES), metavar="HEADSxTOKENS")
    args, where = parser.parse_args(), provenance()
    with torch.inference_mode():
        for case in args.cases:
            heads, tokens = (int(n) for n in case.split("x"))
            bench(heads, tokens, where)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
