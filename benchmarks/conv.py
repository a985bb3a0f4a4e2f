"""From raw projection rows to what a prefill kernel reads: the producer layouts against the chain of operations.

`chain` is convolution, two norms, sigmoid, rounding and the copy of v, as the layer and the adapter of fla-core run
them; `chain + pack` hands un-normed strided tensors to one packing launch. The others are layouts of ops/kda_inputs.
Graph replay, arms in turn, A/A first; outputs are compared before timing.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from common import ROOT, append_row, measured, provenance

from anabranch.measure.timing import Stopwatch, interleave
from anabranch.ops.arithmetic import sigmoid
from anabranch.ops.conv.triton import conv
from anabranch.ops.kda_inputs.spec import KDA_INPUTS, floor
from anabranch.ops.kda_inputs.triton import kda_inputs
from anabranch.ops.norm.triton import l2_norm
from anabranch.ops.pack.triton import pack
from anabranch.ops.segments import Segments

CASES = ("96x16384x1", "12x16384x1", "32x8192x1", "12x4096x16", "96x1024x1")
COLD_BYTES = 330 << 20
DEVICE = torch.device("cuda")
Arm = Callable[..., tuple[torch.Tensor, ...]]


def chain(x, segments, slots, pool, weight, logits) -> tuple[torch.Tensor, ...]:
    heads, dim = logits.shape[1], 128
    q, k, v = (part.unflatten(-1, (heads, dim)) for part in conv(x, segments, slots, pool, weight).chunk(3, -1))
    return l2_norm(q).to(x.dtype), l2_norm(k).to(x.dtype), v.contiguous(), sigmoid(logits.float())


def conv_and_pack(x, segments, slots, pool, weight, logits) -> tuple[torch.Tensor, ...]:
    heads, dim = logits.shape[1], 128
    q, k, v = (part.unflatten(-1, (heads, dim)) for part in conv(x, segments, slots, pool, weight).chunk(3, -1))
    return pack((q, k, v, logits))


ARMS: dict[str, Arm] = {
    "rounded": partial(kda_inputs, layout="rounded"),
    "normed": partial(kda_inputs, layout="normed"),
    "grouped": partial(kda_inputs, layout="grouped"),
    "chain": chain,
    "chain + pack, no norm": conv_and_pack,
}


def inputs(heads: int, tokens: int, count: int) -> tuple:
    width = heads * 128
    wide = torch.randn(tokens, 4 * width + 128 + heads + -heads % 16, device=DEVICE).bfloat16()
    logits = wide[:, 4 * width + 128 : 4 * width + 128 + heads]
    pool = torch.randn(count, 3, 3 * width, device=DEVICE).bfloat16()
    segments = Segments.of([tokens // count] * count, device=DEVICE)
    return wide[:, : 3 * width], segments, torch.arange(count, device=DEVICE), pool, None, logits


def check(given: tuple) -> None:
    """Raise AssertionError unless the layout that replaces the chain equals it."""
    x, segments, slots, pool, weight, logits = given
    pools = pool.clone(), pool.clone()
    want = chain(x, segments, slots, pools[0], weight, logits)
    got = ARMS["rounded"](x, segments, slots, pools[1], weight, logits)
    for name, a, b in zip(("q", "k", "v", "beta"), got, want, strict=True):
        KDA_INPUTS.equality.check(a, b, name)
    assert torch.equal(*pools), "windows differ"


def bench(heads: int, tokens: int, count: int, where: dict) -> None:
    least = floor(tokens, heads)
    weight = torch.randn(3 * heads * 128, 4, device=DEVICE) * 0.3
    sets = []
    for _ in range(max(1, -(-COLD_BYTES * 2 // least.bytes))):
        x, segments, slots, pool, _, logits = inputs(heads, tokens, count)
        sets.append((x, segments, slots, pool, weight, logits))
    check(sets[0])
    calls = len(sets) * -(-4 // len(sets))

    def rotate(arm: Arm) -> None:
        for i in range(calls):
            arm(*sets[i % len(sets)])

    watches = {name: partial(Stopwatch, partial(rotate, arm), calls, DEVICE, True) for name, arm in ARMS.items()}
    timed = interleave(watches, rounds=3, samples=5)
    line = [f"H={heads} T={tokens} B={count} A/A {timed.spread_pct:.1f} %"]
    for name, times in timed.us.items():
        case = {"heads": heads, "tokens": tokens, "segments": count}
        moved = floor(tokens, heads, 4 if name == "normed" else 2).bytes
        row = {"bench": "conv", "case": case, "arm": name, **where, **measured(times, moved)}
        row |= {"aa_spread_pct": round(timed.spread_pct, 2), "equality": KDA_INPUTS.equality.kind}
        append_row(ROOT / "benchmarks/results/conv.jsonl", row)
        line.append(f"{name} {row['us_median']:.1f} ({row['us_median'] / row['floor_us']:.2f}x)")
    print("  ".join(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), metavar="HEADSxTOKENSxSEGMENTS")
    args, where = parser.parse_args(), provenance()
    torch.manual_seed(0)
    with torch.inference_mode():
        for case in args.cases:
            bench(*(int(n) for n in case.split("x")), where)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
