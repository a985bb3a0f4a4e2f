"""MLA decode around attention at the Kimi-Linear shape: from raw projections to the input of o_proj, by graph replay.

Arms: `step` (ops/mla/balanced), `chain` (write, fixed splits, merge, head products: what deterministic mode runs), and
with `--parts` each launch of `step`. Layers' caches take turns, so that none stays in the second-level cache. The floor
is the bytes of cache rows and weights over the bandwidth. `--sweep` also times other launch constants; each must keep
to the reference.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from itertools import islice, product
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch
from common import ROOT, append_row, measured, provenance, time_graph

from anabranch.ops.mla import balanced, reference, triton
from anabranch.ops.mla.spec import MLA_STEP, decode_floor

NOPE, ROPE, V, RANK, PAGE = 128, 64, 128, 512, 64
WORKERS = 12  # processes that compile for a sweep
COLD = 300 << 20  # bytes of cache rows that take turns
ATTEND = (  # rows, warps, stages, upright
    *((64, 4, 2, True), (64, 4, 3, True), (64, 4, 4, True), (64, 8, 3, True), (64, 8, 4, True)),
    *((32, 4, 3, False), (32, 4, 5, False), (32, 8, 5, False), (64, 4, 3, False), (64, 8, 5, False)),
)


class Case:
    """One batch: `layers` sets of cache rows and weights that take turns."""

    def __init__(self, heads: int, batch: int, context: int) -> None:
        self.heads, self.batch, self.context = heads, batch, context
        width = -(-context // PAGE)
        bytes_each = batch * width * PAGE * (RANK + ROPE) * 2
        self.layers = min(16, -(-COLD // bytes_each))
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

    def step(self, i: int, tiles: balanced.Tiles | None = None) -> torch.Tensor:
        places = (self.rows, self.totals, self.table, self.pages[i], self.kv_b[i])
        return balanced.mla_step(self.q, self.kv, self.weight, 1e-5, *places, tiles=tiles)

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

    def check(self, tiles: balanced.Tiles | None = None) -> None:
        """No time without a right result: the first requests against the reference."""
        n = min(self.batch, 2)
        got = self.step(0, tiles)[:n]
        places = (self.rows[:n], self.totals[:n], self.table[:n], self.pages[0].clone(), self.kv_b[0])
        MLA_STEP.equality.check(got, reference.mla_step(self.q[:n], self.kv[:n], self.weight, 1e-5, *places))


def constants(heads: int, batch: int) -> Iterator[balanced.Tiles]:
    """Other launch constants of attend, then of leave, around the chosen ones."""
    base = balanced.choose_tiles(batch, heads, PAGE)
    for (rows, warps, stages, upright), programs in product(ATTEND, (132, 264)):
        yield replace(base, rows=rows, warps=warps, stages=stages, upright=upright, programs=programs)
    for pieces, columns, warps in product((8, 16, 32), (16, 32, 64), (4, 8)) if batch <= 8 else ():
        yield replace(base, pieces=pieces, columns=columns, leave_warps=warps)
    for pieces, part, warps in product((4, 8, 16), (64, 128, 256, 512), (2, 4)):
        yield replace(base, pieces=pieces, columns=0, slice=part, leave_warps=warps)


def compile_some(work: tuple[int, int, int]) -> None:
    """Every WORKERS-th of the constants, into the compiler's cache on disk."""
    heads, batch, first = work
    case = Case(heads, batch, PAGE)
    for tiles in islice(constants(heads, batch), first, None, WORKERS):
        case.step(0, tiles)


def compile_all(heads: int, batches: Sequence[int]) -> None:
    work = [(heads, batch, first) for batch in batches for first in range(WORKERS)]
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_some, work))


def arms(case: Case, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    chosen = balanced.choose_tiles(case.batch, case.heads, PAGE)
    yield "step", case.measure(case.step, options.samples)
    yield "chain", case.measure(case.chain, options.samples)
    if options.parts:
        for name, call in case.parts(chosen).items():
            yield f"step: {name}", case.measure(call, options.samples)
    for tiles in constants(case.heads, case.batch) if options.sweep else ():
        name = " ".join(f"{k}={v}" for k, v in asdict(tiles).items() if v != getattr(chosen, k))
        try:
            case.check(tiles)
        except AssertionError as error:
            print(f"refused: {name}: {error}")
            continue
        yield f"step {name}", case.measure(lambda i, t=tiles: case.step(i, t), options.samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=(1, 8, 32, 64, 128))
    parser.add_argument("--context", type=int, nargs="+", default=(1024, 8192, 32768))
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--parts", action="store_true", help="also each launch of the step")
    parser.add_argument("--sweep", action="store_true", help="also other launch constants")
    options = parser.parse_args()
    torch.manual_seed(0)
    source = provenance()
    if options.sweep:
        compile_all(options.heads, options.batch)
    print(f"{'batch':>5} {'context':>7} {'us':>8} {'floor':>8} {'ratio':>6} {'GB/s':>6}  arm")
    for context, batch in product(options.context, options.batch):
        case = Case(options.heads, batch, context)
        case.check()
        times = list(arms(case, options))
        for arm, found in times:
            shape = {"heads": case.heads, "batch": batch, "context": context, "layers_rotated": case.layers}
            row = {"bench": "mla_decode", "case": shape | {"dtype": "bfloat16"}, "arm": arm, **found, **source}
            append_row(ROOT / "benchmarks/results/mla_decode.jsonl", row)
        named = [t for t in times if not t[0].startswith("step ")]
        swept = sorted((t for t in times if t[0].startswith("step ")), key=lambda t: t[1]["us_median"])
        for arm, found in [*named, *swept[:8]]:
            us, floor = median(found["us"]), found["floor_us"]
            print(f"{batch:5} {context:7} {us:8.1f} {floor:8.1f} {us / floor:6.2f} {found['gbs']:6.0f}  {arm}")
        del case
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
