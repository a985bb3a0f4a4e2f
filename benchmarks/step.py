"""Whole-model decode and prefill of the Kimi-Linear-48B shape on one GPU, in process, with honest dummy weights.

TPOT is the host's time around `Engine.step` over the steps in which every request decodes; TTFT runs from `add` to the
first token. Prompts are random distinct tokens; experts touched are counted on the first decode step's routing.
"""

import argparse
import random
import statistics
import time

import torch
from common import ROOT, append_row, provenance

from anabranch.config.fusion import FusionConfig
from anabranch.engine.llm import LLM
from anabranch.engine.sampling import SamplingParams

CONFIG = ROOT / "tests/data/configs/kimi_linear_48b_config.json"
RESULTS = ROOT / "benchmarks/results"
# active weights + fp32 state in and out + latent rows, at the 4.3 TB/s that a device copy reaches; the peer's method
FLOOR_MS = {1: 1.47, 8: 5.85, 32: 15.45, 64: 21.22, 128: 25.14}


def prompt(length: int, vocab: int, rng: random.Random) -> list[int]:
    return [rng.randrange(vocab) for _ in range(length)]


def decode(llm: LLM, batch: int, tokens_in: int, tokens_out: int, rng: random.Random) -> list[float]:
    """Seconds of each step in which all `batch` requests decode, the first two left out."""
    vocab = llm.model.config.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=tokens_out, ignore_eos=True)
    for _ in range(batch):
        llm.engine.add(llm.request(prompt(tokens_in, vocab, rng), params))
    seconds = []
    while llm.engine.busy:
        running = llm.engine.scheduler.running
        steady = len(running) == batch and all(r.decoding for r in running)
        torch.cuda.synchronize()
        start = time.perf_counter()
        llm.engine.step()
        if steady:
            seconds.append(time.perf_counter() - start)
    return seconds[2:]


def first_token(llm: LLM, tokens_in: int, rng: random.Random) -> float:
    """Seconds from arrival to the first token of one request."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    request = llm.request(prompt(tokens_in, llm.model.config.vocab_size, rng), params)
    llm.engine.add(request)
    while llm.engine.busy:
        llm.engine.step()
    assert request.first_token is not None
    return request.first_token - request.arrived


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 64, 128])
    parser.add_argument("--prefills", type=int, nargs="*", default=[1024, 8192, 32768])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tokens-out", type=int, default=128)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--fusion", default="auto", help="KDA path")
    parser.add_argument("--op", nargs="*", default=[], help="NAME=IMPLEMENTATION")
    args = parser.parse_args()
    where, rng = provenance(), random.Random(0)
    start = time.perf_counter()
    llm = LLM(
        CONFIG,
        load_format="dummy",
        max_seqs=max([*args.batches, 1]),
        max_len=36864,
        prefill_chunk=16384,
        prefix_cache=False,
        memory_fraction=0.94,
        eager=args.eager,
        deterministic=args.deterministic,
        fusion=FusionConfig(kda=args.fusion),
        ops=dict(item.split("=") for item in args.op),
        graph_sizes=args.batches or None,
    )
    print(f"loaded in {time.perf_counter() - start:.0f} s; {llm.memory}")
    print("ops:", ", ".join(f"{name}={how}" for name, (how, _) in llm.model.selection.chosen.items()), flush=True)
    mode = "deterministic" if args.deterministic else "eager" if args.eager else "graphs"
    arm = ", ".join([mode, args.fusion, *args.op])
    for tokens_in in args.prefills:
        first_token(llm, tokens_in, rng)
        samples = [first_token(llm, tokens_in, rng) * 1e6 for _ in range(max(2, args.repeats))]
        us = statistics.median(samples)
        print(f"prefill {tokens_in:6d}: TTFT {us / 1e3:8.1f} ms, {tokens_in / us * 1e6:9.0f} tok/s", flush=True)
        append_row(
            RESULTS / "prefill.jsonl",
            {**where, "bench": "prefill", "case": {"tokens": tokens_in}, "arm": arm, "us": samples, "us_median": us},
        )
    for batch in args.batches:
        runs = [decode(llm, batch, 1024, args.tokens_out, rng) for _ in range(args.repeats)]
        medians = [statistics.mean(r) * 1e3 for r in runs]
        floor = FLOOR_MS.get(batch)
        ratio = f", {min(medians) / floor:.2f}x floor" if floor else ""
        print(f"decode batch {batch:4d}: TPOT {', '.join(f'{m:.2f}' for m in medians)} ms{ratio}", flush=True)
        append_row(
            RESULTS / "decode_step.jsonl",
            {
                **where,
                "bench": "decode_step",
                "case": {"batch": batch, "context": 1024, "out": args.tokens_out, "dtype": "bfloat16"},
                "arm": arm,
                "us": [s * 1e6 for r in runs for s in r],
                "us_median": statistics.median(s * 1e6 for r in runs for s in r),
                "tpot_ms": medians,
                "floor_us": floor and floor * 1e3,
                "graph_replays": dict(llm.engine.runner.graph_replays),
                "eager_steps": dict(llm.engine.runner.eager_steps),
                "ops": {name: how for name, (how, _) in llm.model.selection.chosen.items()},
            },
        )


if __name__ == "__main__":
    main()
