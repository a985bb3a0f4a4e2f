"""Routed experts of prompts at the Kimi-Linear shape: the CUDA kernels against the Triton ones, by CUDA-graph replay.

Arms: `grouped` and `triton` are both products with the sort in front, `spread`, `gate_up` and `down` the CUDA kernels
alone, `matmul gate_up` and `matmul down` one plain product each of as many rows as there are pairs, `sort` and `align`
the sort of each. Two layers' weights take turns, so that none stays in the second-level cache. The floor counts the
experts that the drawn tokens touch. With `--skew` experts are popular to different degrees, and their loads are spread
about as in a real step: of 8192 tokens about 40 to 1000 pairs each, half of the experts below 230. The results are
compared first: with the reference on some tokens, with each other in every bit.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from common import ROOT, append_row, measured, provenance, time_graph

from anabranch.config.model import ActivationConfig
from anabranch.layers.experts import PlainExperts
from anabranch.ops import native
from anabranch.ops.experts import grouped, reference
from anabranch.ops.experts.plan import choose_plan
from anabranch.ops.experts.spec import EXPERTS
from anabranch.ops.experts.tiles import Tiles, align
from anabranch.ops.experts.triton import expert_products, routed_experts

EXPERT_COUNT, INNER, WIDTH, TOP_K, LAYERS = 256, 1024, 2304, 8, 2
TOKENS = (8192, 1024, 2048, 4096)
SKEW = 0.5  # standard deviation of a skewed router's biases, in logits
SILU = ActivationConfig(name="silu")


class Layer:
    """One layer's experts in bf16, as `MoeFfn` holds them."""

    first, count, total = 0, EXPERT_COUNT, EXPERT_COUNT
    gate_up, down = PlainExperts.gate_up, PlainExperts.down

    def __init__(self) -> None:
        def weight(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)

        self.w13, self.w2 = weight(EXPERT_COUNT, 2 * INNER, WIDTH), weight(EXPERT_COUNT, WIDTH, INNER)


@dataclass(kw_only=True)
class Case:
    """The inputs of one token count; every layer gets a choice of its own."""

    tokens: int
    layers: list[Layer]
    skew: float

    def __post_init__(self) -> None:
        self.x = torch.randn(self.tokens, WIDTH, dtype=torch.bfloat16, device="cuda")
        self.chosen = [self._choice() for _ in self.layers]
        self.plan = choose_plan(self.tokens, TOP_K, EXPERT_COUNT, torch.bfloat16)
        self.tile = grouped.TILES[self.pairs > grouped.FEW * EXPERT_COUNT]
        self.programs = torch.cuda.get_device_properties(0).multi_processor_count

    def _choice(self) -> torch.Tensor:
        bias = self.skew * torch.randn(EXPERT_COUNT, device="cuda")
        noise = -torch.empty(self.tokens, EXPERT_COUNT, device="cuda").exponential_().log()  # Gumbel: softmax of biases
        return (bias + noise).topk(TOP_K, -1).indices

    def loads(self) -> str:
        counts = self.chosen[0].flatten().bincount(minlength=EXPERT_COUNT)
        return f"{int(counts.min())} to {int(counts.max())} pairs an expert, median {int(counts.median())}"

    @cached_property
    def pairs(self) -> int:
        return self.tokens * TOP_K

    def sort(self, i: int) -> grouped.Sorted:
        return grouped.sort(self.chosen[i], 0, EXPERT_COUNT, self.tile)

    def align(self, i: int) -> Tiles:
        return align(self.chosen[i], 0, EXPERT_COUNT, self.tile, grouped.TAIL)

    @cached_property
    def sorted(self) -> list[grouped.Sorted]:
        return [self.sort(i) for i in range(LAYERS)]

    @cached_property
    def order(self) -> list[torch.Tensor]:
        """Of each layer, the pair at every place: what `spread` leaves for `down`."""
        return [made.places.argsort().int() for made in self.sorted]

    @cached_property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sorted rows and h, inputs of the products and outputs too; of random values, as real ones draw more power."""
        made = torch.randn(self.pairs, WIDTH, dtype=torch.bfloat16, device="cuda")
        return made, torch.randn(self.pairs, INNER, dtype=torch.bfloat16, device="cuda")

    def ours(self, i: int) -> torch.Tensor:
        return grouped.expert_products(self.x, self.chosen[i], self.layers[i], SILU)

    def triton(self, i: int) -> torch.Tensor:
        return expert_products(self.x, self.chosen[i], self.layers[i], SILU, self.plan)

    def spread(self, i: int) -> None:
        native.load("experts").grouped_spread(self.x, self.sorted[i].places, self.order[i], self.rows[0])

    def gate_up(self, i: int) -> None:
        made, (rows, h) = self.sorted[i], self.rows
        run = native.load("experts").grouped_gate_up
        run(rows, self.layers[i].w13, made.table, h, False, 1.0, 0.0, made.most, self.programs)

    def down(self, i: int) -> None:
        made, (out, h) = self.sorted[i], self.rows
        run = native.load("experts").grouped_down
        run(h, self.layers[i].w2, self.order[i], made.table, out, made.most, self.programs)

    def matmul(self, i: int, down: bool) -> torch.Tensor:
        wide, h = self.rows
        return h @ self.layers[i].w2[0].T if down else wide @ self.layers[i].w13[0].T

    def check(self) -> str:
        """No time without a right result."""
        n, weights = min(self.tokens, 48), torch.rand(self.tokens, TOP_K, device="cuda")
        for i, layer in enumerate(self.layers):
            got, want = self.ours(i), self.triton(i)
            assert got.isfinite().all(), f"{self.tokens} tokens: rows that nobody wrote"
            EXPERTS.equality.check(got, want, f"{self.tokens} tokens against Triton")
            if i == 0:
                whole = routed_experts(self.x, weights, self.chosen[0], layer, SILU)[:n]
                exact = reference.routed_experts(self.x[:n], weights[:n], self.chosen[0][:n], layer, SILU)
                EXPERTS.equality.check(whole.bfloat16(), exact.bfloat16(), "against the reference")
            if not torch.equal(got, want):
                return f"tolerance; {int((got != want).sum())} of {got.numel()} values have other bits than Triton's"
        return "bitwise"

    def products(self, wide: bool, narrow: bool) -> tuple[float, float]:
        """Least bytes and operations of gate-up, of down, or of both."""
        touched = sum(chosen.unique().numel() for chosen in self.chosen) / LAYERS
        columns, ends = 2 * wide + narrow, self.tokens * WIDTH * wide + self.pairs * WIDTH * narrow
        between = self.pairs * INNER * (wide != narrow)
        moved = 2.0 * (touched * columns * INNER * WIDTH + ends + between)
        return moved, 2 * self.pairs * columns * INNER * WIDTH

    def measure(self, call: Callable[[int], Any], moved: float, flops: float) -> dict[str, Any]:
        def run() -> None:
            for i in range(LAYERS):
                call(i)

        times = measured(time_graph(run, LAYERS, samples=10), moved, flops)
        return times | {"tflops": round(flops / times["us_median"] / 1e6, 1)}


def report(case: Case, equality: str, source: dict[str, Any]) -> None:
    both, wide, narrow = case.products(True, True), case.products(True, False), case.products(False, True)
    shape = {"experts": EXPERT_COUNT, "top_k": TOP_K, "inner": INNER, "width": WIDTH, "layers_rotated": LAYERS}
    shape |= {"skew": case.skew} if case.skew else {}
    sorting = 12.0 * case.pairs, 0.0
    arms: dict[str, tuple[Callable[[int], Any], float, float]] = {
        "grouped": (case.ours, *both),
        "triton": (case.triton, *both),
        "spread": (case.spread, 2.0 * (case.tokens + case.pairs) * WIDTH, 0.0),
        "gate_up": (case.gate_up, *wide),
        "down": (case.down, *narrow),
        "matmul gate_up": (partial(case.matmul, down=False), *wide),
        "matmul down": (partial(case.matmul, down=True), *narrow),
        "sort": (case.sort, *sorting),
        "align": (case.align, *sorting),
    }
    for arm, call in arms.items():
        times = case.measure(*call)
        row = {"bench": "grouped_experts", "case": {"tokens": case.tokens, **shape}, "arm": arm, **times}
        append_row(ROOT / "benchmarks/results/grouped.jsonl", row | {"equality": equality, **source})
        us, floor = times["us_median"], times["floor_us"]
        print(f"{case.tokens:7} {us:9.1f} {floor:9.1f} {us / floor:6.2f} {times['tflops']:8.0f}  {arm}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--skew", action="store_true", help="draw experts as a trained router does, not uniformly")
    options = parser.parse_args()
    torch.manual_seed(0)
    layers, source = [Layer() for _ in range(LAYERS)], provenance()
    print(f"{'tokens':>7} {'us':>9} {'floor':>9} {'ratio':>6} {'TFLOP/s':>8}  arm")
    for tokens in options.tokens:
        case = Case(tokens=tokens, layers=layers, skew=SKEW if options.skew else 0.0)
        equality = case.check()
        print(f"{tokens:7} equality: {equality}; {case.loads()}")
        report(case, equality, source)


if __name__ == "__main__":
    main()
