"""MLA prefill at the Kimi-Linear shape: expanding the cache rows, attention and merge, eager and by events.

Arms: `cudnn` (squares and rectangles) and `sdpa` (one call a sequence). A case is new tokens, tokens before them, and
sequences. `first` is the host's time of the first call at a size not met before: the library plans anew for it.
The floor is the products over the bf16 peak.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from common import ROOT, append_row, measured, provenance

from anabranch.measure.timing import Stopwatch
from anabranch.ops.mla import cudnn, sdpa
from anabranch.ops.mla.spec import MLA_PREFILL
from anabranch.ops.segments import Segments

NOPE, ROPE, V, RANK, PAGE = 128, 64, 128, 512, 64
CASES = ("1024x0x1", "8192x0x1", "16384x0x1", "16384x16384x1", "16384x114688x1", "1024x0x16", "512x8192x4")


class Case:
    """`count` sequences of `new` tokens behind `old` ones."""

    def __init__(self, heads: int, new: int, old: int, count: int) -> None:
        self.heads, self.new, self.old, self.count = heads, new, old, count
        width = -(-(new + old) // PAGE)
        self.q = torch.randn(new * count, heads * 192 + 640, device="cuda").bfloat16()[:, : heads * 192]
        self.q = self.q.unflatten(1, (heads, 192))
        self.table = torch.randperm(width * count, device="cuda").view(count, width)
        pages = torch.empty(width * count, PAGE, RANK + ROPE, dtype=torch.bfloat16, device="cuda")
        self.pages = pages.normal_()
        self.kv_b = (torch.randn(heads, NOPE + V, RANK, device="cuda") * RANK**-0.5).bfloat16()
        self.segments = Segments.of([new] * count, [new + old] * count, "cuda")

    def run(self, op: Callable[..., torch.Tensor]) -> torch.Tensor:
        return op(self.q, self.segments, self.table, self.pages, self.kv_b)

    def flops(self) -> int:
        pairs = self.new * (self.new + 1) // 2 + self.new * self.old
        expand = (self.new + self.old) * RANK * (NOPE + V)
        return 2 * self.count * self.heads * (pairs * (NOPE + ROPE + V) + expand)

    def pieces(self) -> Iterator[tuple[str, Callable[[], Any], int]]:
        """The steps of the cudnn arm for one sequence, with their floating-point operations."""
        rows = self.pages.flatten(0, 1)
        new, q = rows[: self.new], self.q[: self.new]
        k, v = cudnn._expand(new, self.kv_b, NOPE)
        expand, pairs = 2 * self.new * self.heads * RANK * (NOPE + V), 2 * self.heads * (NOPE + ROPE + V)
        yield "expand the new", lambda: cudnn._expand(new, self.kv_b, NOPE), expand
        square = pairs * self.new * (self.new + 1) // 2
        yield "square", lambda: cudnn.attend(q, k, v, causal=True, sums=True), square
        if self.old >= self.new:
            full = lambda: cudnn.attend(q, k, v, causal=False, sums=True)  # noqa: E731
            yield "rectangle of the same size", full, pairs * self.new**2
            a, b = full(), full()
            yield "merge", lambda: cudnn.merge(*a, *b, q.dtype), 0

    def check(self) -> None:
        MLA_PREFILL.equality.check(self.run(cudnn.mla_prefill), self.run(sdpa.mla_prefill))


def first_calls(heads: int) -> None:
    """Sizes that nothing else here uses; padded to the same multiple, the second of a pair is known."""
    for new in (2000, 2001, 3111, 3100, 5000):
        case = Case(heads, new, 0, 1)
        for name, op in (("cudnn", cudnn.mla_prefill), ("sdpa", sdpa.mla_prefill)):
            times = []
            for _ in range(2):
                torch.cuda.synchronize()
                start = time.perf_counter()
                case.run(op)
                torch.cuda.synchronize()
                times.append((time.perf_counter() - start) * 1e3)
            print(f"first {new}: {name} {times[0]:.2f} ms, again {times[1]:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="NEWxOLDxSEQUENCES")
    parser.add_argument("--heads", type=int, default=32)
    options = parser.parse_args()
    torch.manual_seed(0)
    source, device = provenance(), torch.device("cuda")
    print(f"{'new':>6} {'old':>6} {'seqs':>4} {'us':>9} {'floor':>9} {'TFLOP/s':>8}  arm")
    for new, old, count in ([int(n) for n in case.split("x")] for case in options.cases.split(",")):
        case = Case(options.heads, new, old, count)
        case.check()
        ops = (("cudnn", cudnn.mla_prefill), ("sdpa", sdpa.mla_prefill))
        arms = [(name, partial(case.run, op), case.flops()) for name, op in ops]
        for arm, run, flops in [*arms, *case.pieces()]:
            times = measured(Stopwatch(run, 1, device).sample(5), 0, flops)
            shape = {"heads": case.heads, "new": new, "old": old, "sequences": count, "dtype": "bfloat16"}
            row = {"bench": "mla_prefill", "case": shape, "arm": arm, **times, **source}
            append_row(ROOT / "benchmarks/results/mla_prefill.jsonl", row)
            us = times["us_median"]
            print(f"{new:6} {old:6} {count:4} {us:9.1f} {times['floor_us']:9.1f} {flops / us / 1e6:8.0f}  {arm}")
    first_calls(options.heads)


if __name__ == "__main__":
    main()
