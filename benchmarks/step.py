"""Whole-model decode and prefill of the Kimi-Linear-48B shape on one GPU, in process, with honest dummy weights.

TPOT is the host's time from one step's tokens to the next one's, over the steps in which every request decodes; TTFT
runs from `add` to the first token. Prompts are random tokens; the floor assumes a uniform router (see `floor_ms`).
`--profile` also says where a decode step goes: rows of step_profile.jsonl, with the profiler's cost in them.
"""

import argparse
import random
import statistics
import time
from collections import defaultdict

import torch
from common import ROOT, append_row, floor_us, provenance

from anabranch.config.fusion import FusionConfig
from anabranch.engine.llm import LLM
from anabranch.engine.sampling import SamplingParams
from anabranch.layers.experts import PlainExperts
from anabranch.ops.kda_decode.spec import floor as state_floor

CONFIG = ROOT / "tests/data/configs/kimi_linear_48b_config.json"
RESULTS = ROOT / "benchmarks/results"


def floor_ms(llm: LLM, batch: int, context: int) -> float:
    """Least time of a decode step: weights it must read, fp32 state in and out, latent rows, over copy bandwidth.

    A uniform router is assumed, which dummy weights come close to: E * (1 - (1 - k/E)^batch) experts a layer.
    """
    config, moe = llm.model.config, llm.model.config.moe
    assert moe is not None
    experts = [m for m in llm.model.modules() if isinstance(m, PlainExperts)]
    stacked = sum(p.numel() * p.element_size() for m in experts for p in m.parameters())
    everything = sum(p.numel() * p.element_size() for p in llm.model.parameters())
    embedding = llm.model.model.embed_tokens.weight
    touched = 1 - (1 - moe.top_k / moe.experts) ** batch
    weights = everything - stacked - embedding.numel() * embedding.element_size() + touched * stacked
    state = config.layer_count("kda") * state_floor(batch, config.kda.heads, config.kda.head_dim).bytes
    latent = batch * context * llm.engine.runner.cache.shape.bytes_per_token
    return floor_us(weights + state + latent) / 1e3


def prompt(length: int, vocab: int, rng: random.Random) -> list[int]:
    return [rng.randrange(vocab) for _ in range(length)]


def decode(llm: LLM, batch: int, tokens_in: int, tokens_out: int, rng: random.Random) -> list[float]:
    """Seconds from each step's tokens to the next one's while all `batch` requests decode, the first two left out."""
    vocab = llm.model.config.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=tokens_out, ignore_eos=True)
    for _ in range(batch):
        llm.engine.add(llm.request(prompt(tokens_in, vocab, rng), params))
    seconds, last = [], None
    while llm.engine.busy:
        told = llm.engine.step()
        now = time.perf_counter()
        steady = len(told) == batch and all(len(r.sampled) > 1 for r in told)
        if steady and last is not None:
            seconds.append(now - last)
        last = now if steady else None
    return seconds[2:]


def profile(llm: LLM, batch: int, where: dict, rng: random.Random, steps: int = 4) -> None:
    """Kernels, copies and fills of a few decode steps by name."""
    vocab, params = llm.model.config.vocab_size, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    requests = [llm.request(prompt(1024, vocab, rng), params) for _ in range(batch)]
    for request in requests:
        llm.engine.add(request)
    while min(len(r.sampled) for r in requests) < 4:
        llm.engine.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            llm.engine.step()
        torch.cuda.synchronize()
    while llm.engine.busy:
        llm.engine.step()
    spent, spans = defaultdict(lambda: [0.0, 0]), []
    for event in seen.events() or ():
        if event.device_type == torch.profiler.DeviceType.CUDA and not event.is_user_annotation:
            spans.append((event.time_range.start, event.time_range.end))
            spent[event.name[:120]][0] += event.device_time
            spent[event.name[:120]][1] += 1
    busy, end = 0.0, 0.0
    for start, stop in sorted(spans):
        busy, end = busy + max(0.0, stop - max(start, end)), max(end, stop)
    kernels = sorted(([name, us / steps, count / steps] for name, (us, count) in spent.items()), key=lambda k: -k[1])
    print(
        f"profile batch {batch}: {len(spans) / steps:.0f} launches a step, GPU busy {busy / steps:.0f} us", flush=True
    )
    for name, us, count in kernels[:12]:
        print(f"  {us:9.1f} us {count:6.1f}x  {name[:90]}")
    found = {"launches": len(spans) / steps, "busy_us": busy / steps, "sum_us": sum(us for _, us, _ in kernels)}
    row = {"bench": "step_profile", "case": {"batch": batch, "context": 1024}, **found, "kernels": kernels[:40]}
    append_row(RESULTS / "step_profile.jsonl", where | row)


def first_token(llm: LLM, tokens_in: int, rng: random.Random) -> float:
    """Seconds from arrival to the first token of one request."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    request = llm.request(prompt(tokens_in, llm.model.config.vocab_size, rng), params)
    llm.engine.add(request)
    while llm.engine.busy:
        llm.engine.step()
    assert request.first_token is not None
    return request.first_token - request.arrived


def bench_prefill(llm: LLM, tokens_in: int, repeats: int, where: dict, rng: random.Random) -> None:
    first_token(llm, tokens_in, rng)
    samples = [first_token(llm, tokens_in, rng) * 1e6 for _ in range(max(2, repeats))]
    us = statistics.median(samples)
    print(f"prefill {tokens_in:6d}: TTFT {us / 1e3:8.1f} ms, {tokens_in / us * 1e6:9.0f} tok/s", flush=True)
    row = {"bench": "prefill", "case": {"tokens": tokens_in}, "us": samples, "us_median": us}
    append_row(RESULTS / "prefill.jsonl", where | row)


def bench_decode(llm: LLM, batch: int, tokens_out: int, repeats: int, where: dict, rng: random.Random) -> None:
    context = 1024
    runs = [decode(llm, batch, context, tokens_out, rng) for _ in range(repeats)]
    means, floor = [statistics.mean(r) * 1e3 for r in runs], floor_ms(llm, batch, context)
    shown = ", ".join(f"{m:.2f}" for m in means)
    print(f"decode batch {batch:4d}: TPOT {shown} ms, {min(means) / floor:.2f}x floor", flush=True)
    samples = [s * 1e6 for r in runs for s in r]
    row = {
        "bench": "decode_step",
        "case": {"batch": batch, "context": context, "out": tokens_out, "dtype": "bfloat16"},
        "us": samples,
        "us_median": statistics.median(samples),
        "tpot_ms": means,
        "floor_us": floor * 1e3,
        "graph_replays": dict(llm.engine.runner.graph_replays),
        "eager_steps": dict(llm.engine.runner.eager_steps),
        "ops": {name: how for name, (how, _) in llm.model.selection.chosen.items()},
    }
    append_row(RESULTS / "decode_step.jsonl", where | row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 64, 128])
    parser.add_argument("--prefills", type=int, nargs="*", default=[1024, 8192, 32768])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tokens-out", type=int, default=128)
    parser.add_argument("--profile", action="store_true", help="also record where a step goes")
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
        bench_prefill(llm, tokens_in, args.repeats, where | {"arm": arm}, rng)
    for batch in args.batches:
        bench_decode(llm, batch, args.tokens_out, args.repeats, where | {"arm": arm}, rng)
        if args.profile:
            profile(llm, batch, where | {"arm": arm}, rng)


if __name__ == "__main__":
    main()
