"""Rows of `anabranch bench decode-step` and `bench prefill`: the Kimi-Linear-48B shape on one GPU, loaded once for all.

TPOT is the host's time from one step's tokens to the next one's, over the steps in which every request decodes; TTFT
runs from `add` to the first token. Prompts are random tokens; the floor counts the experts that the router chose.
`--profile` also says where a step goes, `--paths A,B` compares two projection paths, in turn on the same requests.
"""

import argparse
import random
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from common import ROOT, append_row, provenance

from anabranch.config.fusion import FusionConfig
from anabranch.engine.llm import LLM
from anabranch.measure.decode_step import bench_decode, lines
from anabranch.measure.prefill import bench_prefill
from anabranch.measure.step_paths import StepPaths
from anabranch.measure.whole_model import MAX_LEN, ModelOptions

CONFIG = ROOT / "tests/data/configs/kimi_linear_48b_config.json"
RESULTS = ROOT / "benchmarks/results"


def keep(where: dict, text: Iterable[str], *rows: dict) -> None:
    print(*text, sep="\n", flush=True)
    for row in rows:
        append_row(RESULTS / f"{row['bench']}.jsonl", where | row)


def bench(llm: LLM, args: argparse.Namespace, where: dict) -> None:
    rng = random.Random(0)
    for tokens_in in args.prefills:
        found = bench_prefill(llm, tokens_in, repeats=args.repeats, profile=args.profile, rng=rng)
        keep(where, found.lines(), found.row(), *([found.profile_row()] if found.launches else []))
    lengths = {"tokens_in": args.tokens_in, "tokens_out": args.tokens_out, "repeats": args.repeats}
    for batch in args.batches:
        result = bench_decode(llm, batch, **lengths, rng=rng)
        recorded = [result.profile_row()] if args.profile and result.launches else []
        keep(where, lines(result, args.profile), result.row(), *recorded)
    for pair in args.paths:
        arms = StepPaths(llm, pair.split(","))
        for batch in args.batches:
            compared = arms.bench(batch, **lengths, rng=rng)
            keep(where, [compared.line()], *compared.rows())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 64, 128])
    parser.add_argument("--prefills", type=int, nargs="*", default=[1024, 8192, 32768])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tokens-in", type=int, default=1024)
    parser.add_argument("--tokens-out", type=int, default=128)
    parser.add_argument("--prefill-chunk", type=int, default=16384)
    parser.add_argument("--max-len", type=int, default=MAX_LEN, help="that cache and graphs are made for")
    parser.add_argument("--paths", nargs="*", default=[], help="A,B: pairs of projection paths, each also KDA+MLA")
    parser.add_argument("--profile", action="store_true", help="also record where a step goes")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--state-dtype", default="float32")
    parser.add_argument("--fusion", default="auto", help="KDA path")
    parser.add_argument("--op", nargs="*", default=[], help="NAME=IMPLEMENTATION")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    start = time.perf_counter()
    made = ModelOptions(
        config=args.config,
        max_len=args.max_len,
        sizes=args.batches,
        device=args.device,
        state_dtype=args.state_dtype,
        prefill_chunk=args.prefill_chunk,
        eager=args.eager,
        deterministic=args.deterministic,
        fusion=FusionConfig(kda=args.fusion),
        ops=dict(item.split("=") for item in args.op),
    )
    llm = made.open()
    print(f"loaded in {time.perf_counter() - start:.0f} s; {llm.memory}")
    print("ops:", ", ".join(f"{name}={how}" for name, (how, _) in llm.model.selection.chosen.items()), flush=True)
    where = provenance(llm.engine.runner.device) | {"arm": made.arm(llm)}
    with torch.inference_mode():
        bench(llm, args, where)


if __name__ == "__main__":
    main()
