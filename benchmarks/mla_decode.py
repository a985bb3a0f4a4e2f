"""MLA decode around attention at the Kimi-Linear shape: from raw projections to the input of o_proj, by graph replay.

Arms: `step` (ops/mla/balanced) and, where that is CUDA C++, its Triton kernels; `chain` (write, fixed splits, merge,
head products: what deterministic mode runs); with `--parts` each launch of `step`. Layers' caches take turns, so that
none stays in the second-level cache. The floor is the bytes of cache rows and weights over the bandwidth.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from common import ROOT, append_row, measured, provenance, time_graph

from anabranch.ops.mla import balanced, reference, triton
from anabranch.ops.mla.spec import MLA_STEP, decode_floor

NOPE, ROPE, V, RANK, PAGE = 128, 64, 128, 512, 64
COLD = 300 << 20  # bytes of cache rows that take turns


class Case:
    """One batch: `layers` sets of cache rows and weights that take turns."""

    def __init__(self, heads: int, batch: int, context: int) -> None:
        self.heads, self.batch, self.context = heads, batch, context
        width = -(-context // PAGE)
        bytes_each = batch * width * PAGE * (RANK + ROPE) * 2
        self.layers = max(4, min(16, -(-COLD // bytes_each)))
        queries = heads * (NOPE + ROPE)
        wide = torch.randn(batch, queries + RANK + ROPE, device="cuda").bfloat16()
        self.q = wide[:, :queries].unflatten(1, (heads, NOPE + ROPE))
        self.kv, self.weight = wide[:, queries:], torch.ones(RANK, device="cuda").bfloat16()
        # the graph's table is as wide as the longest sequence that it was captured for
        self.table = torch.zeros(batch, max(576, width), dtype=torch.int64, device="cuda")
        self.table[:, :width] = torch.randperm(batch * width, device="cuda").view(batch, width)
        self.totals = torch.full((batch,), context, device="cuda")
        last = (context - 1) // PAGE
        self.rows = self.table[:, last] * PAGE + (context - 1) % PAGE
        self.pages = [
            torch.empty(batch * width + 1, PAGE, RANK + ROPE, dtype=torch.bfloat16, device="cuda").normal_()
            for _ in range(self.layers)
        ]
        self.kv_b = [
            (torch.randn(heads, NOPE + V, RANK, device="cuda") * RANK**-0.5).bfloat16() for _ in range(self.layers)
        ]

    def step(self, i: int, tiles: balanced.Tiles) -> torch.Tensor:
        places = (self.rows, self.totals, self.table, self.pages[i], self.kv_b[i])
        return balanced.mla_step(self.q, self.kv, self.weight, 1e-5, *places, tiles=tiles, early=True)

    def chain(self, i: int) -> torch.Tensor:
        triton.mla_write(self.kv, self.weight, 1e-5, self.rows, self.pages[i])
        return triton.mla_decode(self.q, self.totals, self.table, self.pages[i], self.kv_b[i])

    def parts(self, tiles: balanced.Tiles) -> dict[str, Callable[[int], Any]]:
        """Each launch of the step on inputs that the others left."""
        enter = (self.q, self.kv, self.weight, 1e-5, self.rows)
        absorbed = balanced._launch_enter(*enter, self.pages[0], self.kv_b[0])
        pieces = balanced._launch_attend(absorbed, self.q, self.totals, self.table, self.pages[0], tiles)
        place = (self.q, self.totals, self.table)
        return {
            "enter": lambda i: balanced._launch_enter(*enter, self.pages[i], self.kv_b[i]),
            "attend": lambda i: balanced._launch_attend(absorbed, *place, self.pages[i], tiles),
            "leave": lambda i: balanced._launch_leave(*pieces, self.totals, self.kv_b[i], NOPE, None, tiles),
        }

    def measure(self, call: Callable[[int], Any], samples: int) -> dict[str, Any]:
        rounds = max(1, 8 // self.layers)

        def run() -> None:
            for _ in range(rounds):
                for i in range(self.layers):
                    call(i)

        floor = decode_floor([self.context] * self.batch, self.heads)
        return measured(time_graph(run, rounds * self.layers, samples=samples), floor.bytes, floor.flops)

    def check(self, tiles: balanced.Tiles) -> None:
        """No time without a right result: the first requests against the reference."""
        n = min(self.batch, 2)
        got = self.step(0, tiles)[:n]
        places = (self.rows[:n], self.totals[:n], self.table[:n], self.pages[0].clone(), self.kv_b[0])
        MLA_STEP.equality.check(got, reference.mla_step(self.q[:n], self.kv[:n], self.weight, 1e-5, *places))


def arms(case: Case, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    chosen = balanced.plan(case.q, case.pages[0], case.kv_b[0])
    steps = {"step": chosen}
    if chosen.cuda:
        steps["step in Triton"] = balanced.choose_tiles(case.batch, case.heads, PAGE)
    for name, tiles in steps.items():
        case.check(tiles)
        yield name, case.measure(partial(case.step, tiles=tiles), options.samples)
    yield "chain", case.measure(case.chain, options.samples)
    if options.parts:
        for name, call in case.parts(chosen).items():
            yield f"step: {name}", case.measure(call, options.samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=(1, 8, 32, 64, 128))
    parser.add_argument("--context", type=int, nargs="+", default=(1024, 8192, 32768))
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--parts", action="store_true", help="also each launch of the step")
    options = parser.parse_args()
    torch.manual_seed(0)
    source = provenance()
    print(f"{'batch':>5} {'context':>7} {'us':>8} {'floor':>8} {'ratio':>6} {'GB/s':>6}  arm")
    for context, batch in product(options.context, options.batch):
        case = Case(options.heads, batch, context)
        for arm, found in arms(case, options):
            shape = {"heads": case.heads, "batch": batch, "context": context, "layers_rotated": case.layers}
            row = {"bench": "mla_decode", "case": shape | {"dtype": "bfloat16"}, "arm": arm, **found, **source}
            append_row(ROOT / "benchmarks/results/mla_decode.jsonl", row)
            us, floor, gbs = median(found["us"]), found["floor_us"], found["gbs"]
            print(f"{batch:5} {context:7} {us:8.1f} {floor:8.1f} {us / floor:6.2f} {gbs:6.0f}  {arm}", flush=True)
        del case
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
