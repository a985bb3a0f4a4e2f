"""Rows of `anabranch bench prologue` and `anabranch bench mla-gate` at the layouts that the documents quote.

The measuring is `anabranch.measure`: cold weights, CUDA-graph replay, A/A first, arms interleaved, and no figure for a
path that does not equal the separate one. `deferred` is left out, for it leaves f_b to the decode step; projection and
step together are timed by `anabranch bench kda-decode --only chain`, a whole chain by `anabranch tune`.
"""

import argparse
from collections.abc import Iterable

import torch
from common import ROOT, append_row, provenance

from anabranch.measure.paths import Result, bench_mla_gate, bench_prologue
from anabranch.measure.subject import Subject
from anabranch.parallel.layout import Layout

CASES = {
    "k3-tp8": ("kimi_k3_config.json", Layout(tp=8)),
    "k3-dp-attention": ("kimi_k3_config.json", Layout(tp=16, dp_attention=16, ep=16)),
    "kl-tp1": ("kimi_linear_48b_config.json", Layout()),
}
ROWS = (1, 8, 16, 32, 64, 128, 512)
GATE_ROWS = (1, 4, 16, 64)
CONTEXTS = (512, 4096, 32768, 131072)


def keep(case: str, results: Iterable[Result], where: dict) -> None:
    for result in results:
        shown = [f"{arm} {result.timed.median(arm):7.1f}" for arm in result.timed.us]
        size = ", ".join(f"{name} {result.case[name]}" for name in ("m", "context") if name in result.case)
        print(
            f"{case} {result.bench} {result.case['kind']} {size} A/A {result.timed.spread_pct:4.1f} %",
            *shown,
            flush=True,
        )
        for row in result.rows():
            file = ROOT / f"benchmarks/results/{result.bench}.jsonl"
            append_row(file, where | row | {"case": {"layout": case} | row["case"]})


def bench(case: str, args: argparse.Namespace, where: dict) -> None:
    file, layout = CASES[case]
    ops = {"linear": args.linear} if args.linear else {}
    path = ROOT / "tests/data/configs" / file
    subject = Subject.open(path, layout=layout, device="cuda", dtype="bfloat16", ops=ops)
    gated = subject.config.mla.output_gate
    for kind in args.kinds:
        if kind == "kda" or gated:
            keep(case, bench_prologue(subject, kind, args.rows, graph=True), where)
            torch.cuda.empty_cache()
    if args.gate and gated:
        results = bench_mla_gate(subject, args.gate_rows, args.contexts, graph=True, tokens=args.tokens)
        keep(case, results, where)
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--linear", help="implementation of the matrix product; default: the one a model would take")
    parser.add_argument("--kinds", nargs="*", default=["kda", "mla"], choices=["kda", "mla"])
    parser.add_argument("--gate", action="store_true", help="also whole MLA layers over contexts")
    parser.add_argument("--gate-rows", nargs="*", type=int, default=list(GATE_ROWS))
    parser.add_argument("--contexts", nargs="*", type=int, default=list(CONTEXTS))
    parser.add_argument("--tokens", type=int, help="most latent rows of one case of --gate")
    args = parser.parse_args()
    where = provenance()
    with torch.inference_mode():
        for case in args.cases:
            bench(case, args, where)


if __name__ == "__main__":
    main()
