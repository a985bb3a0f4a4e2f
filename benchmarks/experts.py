"""Routed experts at the Kimi-Linear shape: the whole operation (sort, both GEMMs, weighted sum) by CUDA-graph replay.

Four layers' weights take turns, so that none stays in the second-level cache. The floor counts the experts that the
drawn tokens really touch. `--sweep` also times other tiles and refuses one that changes a bit of the result.
"""

import argparse
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from common import ROOT, append_row, measured, provenance, time_graph

from anabranch.config.model import ActivationConfig
from anabranch.layers.experts import PlainExperts
from anabranch.ops.experts import reference
from anabranch.ops.experts.spec import EXPERTS
from anabranch.ops.experts.triton import Tile, choose_tiles, routed_experts

EXPERT_COUNT, INNER, WIDTH, TOP_K, LAYERS = 256, 1024, 2304, 8, 4
TOKENS = (1, 8, 32, 64, 128, 2048, 8192)
SHARED_LIMIT = 232_448
SILU = ActivationConfig(name="silu")


class Bank:
    """One layer's stacks in bf16, as `PlainExperts` holds them."""

    first, count = 0, EXPERT_COUNT
    gate_up, down = PlainExperts.gate_up, PlainExperts.down

    def __init__(self) -> None:
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        self.w13 = torch.empty(EXPERT_COUNT, 2 * INNER, WIDTH, **options).normal_(0, 0.02)
        self.w2 = torch.empty(EXPERT_COUNT, WIDTH, INNER, **options).normal_(0, 0.02)


class Case:
    """The inputs of one token count, one routing a layer."""

    def __init__(self, tokens: int, banks: list[Bank]) -> None:
        self.tokens, self.banks = tokens, banks
        self.x = torch.randn(tokens, WIDTH, dtype=torch.bfloat16, device="cuda")
        self.weights = torch.rand(tokens, TOP_K, device="cuda")
        self.chosen = [torch.rand(tokens, EXPERT_COUNT, device="cuda").topk(TOP_K).indices for _ in banks]
        self.touched = sum(c.unique().numel() for c in self.chosen) / len(banks)
        self.rounds = 8 if tokens <= 128 else 1

    def layer(self, index: int, tiles: tuple[Tile, Tile] | None) -> torch.Tensor:
        return routed_experts(self.x, self.weights, self.chosen[index], self.banks[index], SILU, tiles)

    def measure(self, tiles: tuple[Tile, Tile] | None) -> dict[str, Any]:
        def run() -> None:
            for _ in range(self.rounds):
                for index in range(LAYERS):
                    self.layer(index, tiles)

        moved = self.touched * 3 * INNER * WIDTH * 2 + self.tokens * WIDTH * (2 + 4)
        return measured(time_graph(run, self.rounds * LAYERS), moved, 6 * self.tokens * TOP_K * INNER * WIDTH)

    def check(self) -> None:
        """No time without a right result: the first tokens against the reference."""
        n = min(self.tokens, 64)
        got = self.layer(0, None)[:n]
        inputs = (self.x[:n], self.weights[:n], self.chosen[0][:n], self.banks[0], SILU)
        EXPERTS.equality.check(got.bfloat16(), reference.routed_experts(*inputs).bfloat16())


def other_tiles(tokens: int) -> Iterator[tuple[Tile, Tile]]:
    """Neighbours of the chosen pair: one GEMM's tile changes at a time, then both token counts."""
    wide, narrow = choose_tiles(tokens, TOP_K, EXPERT_COUNT, torch.bfloat16)
    sizes = list(product((64, 128), (64, 128), (4, 8), (3, 4, 5)))
    for T in (wide.T,) if tokens == 1 else (wide.T // 2, wide.T, wide.T * 2):
        if not 16 <= T <= 128:
            continue
        base = [Tile(T=T, R=t.R, K=t.K, num_warps=t.num_warps, num_stages=t.num_stages) for t in (wide, narrow)]
        yield base[0], base[1]
        if T != wide.T:
            continue
        made = [Tile(T=T, R=r, K=k, num_warps=w, num_stages=s) for r, k, w, s in sizes if r * T <= w * 2048]
        yield from ((t, base[1]) for t in made if (2 * t.R + T) * t.K * 2 * t.num_stages <= SHARED_LIMIT)
        yield from ((base[0], t) for t in made if (t.R + T) * t.K * 2 * t.num_stages <= SHARED_LIMIT)


def sweep(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """(arm, timing) of each neighbour, after its bits were compared with those of the chosen tiles."""
    want = case.layer(0, None)
    for tiles in other_tiles(case.tokens):
        name = " ".join(f"T{t.T}R{t.R}K{t.K}w{t.num_warps}s{t.num_stages}" for t in tiles)
        if not torch.equal(case.layer(0, tiles), want):
            print(f"refused: {name} changes bits at {case.tokens} tokens")
            continue
        yield name, case.measure(tiles)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--sweep", action="store_true", help="also time neighbouring tiles (a minute a token count)")
    options = parser.parse_args()
    torch.manual_seed(0)
    banks, source = [Bank() for _ in range(LAYERS)], provenance()
    print(f"{'tokens':>7} {'experts':>7} {'us':>9} {'floor':>9} {'ratio':>6} {'GB/s':>7}  arm")
    for tokens in options.tokens:
        case = Case(tokens, banks)
        case.check()
        arms = [("triton", case.measure(None)), *(sorted(sweep(case), key=_median) if options.sweep else ())]
        for arm, times in arms:
            shape = {"tokens": tokens, "experts": EXPERT_COUNT, "touched": case.touched, "top_k": TOP_K}
            sizes = {"inner": INNER, "width": WIDTH, "dtype": "bfloat16", "layers_rotated": LAYERS}
            row = {"bench": "experts", "case": shape | sizes, "arm": arm, **times, **source}
            append_row(ROOT / "benchmarks/results/experts.jsonl", row)
        for arm, times in arms[:6]:
            us, floor = times["us_median"], times["floor_us"]
            print(f"{tokens:7} {case.touched:7.1f} {us:9.1f} {floor:9.1f} {us / floor:6.2f} {times['gbs']:7.0f}  {arm}")


def _median(arm: tuple[str, dict[str, Any]]) -> float:
    return arm[1]["us_median"]


if __name__ == "__main__":
    main()
