"""The Kimi-Linear-48B shape over several GPUs of one host: time per token, throughput, and equality with one GPU.

Each layout runs in a process of its own, which starts its ranks. Throughput counts the tokens of the time in which all
requests decode; TPOT is the number of requests over it, whatever the ranks do at once. Dummy weights are the same in
every layout. `--equality` compares layouts with the first one, in deterministic mode: the whole model in bf16 by the
log probabilities of given tokens, and eight layers of it in fp32 by the tokens of greedy answers.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, append_row, provenance

from anabranch import LLM, SamplingParams
from anabranch.config.fusion import FusionConfig

CONFIG = ROOT / "tests/data/configs/kimi_linear_48b_config.json"
RESULTS = ROOT / "benchmarks/results/layouts.jsonl"
CONTEXT = 1024
LAYERS = 8


def parse(layout: str) -> dict[str, int]:
    """From "tp=2,dp_attention=2,ep=2"; "tp=1" is one GPU."""
    return {name: int(value) for name, _, value in (item.partition("=") for item in layout.split(","))}


def prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]


def decode(llm: LLM, batch: int, tokens_out: int, seed: int) -> tuple[float, int]:
    """Seconds and tokens from the moment when all `batch` requests decode until the first of them ends."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens_out, ignore_eos=True)
    requests = [llm.request(p, params) for p in prompts(batch, CONTEXT, llm.model.config.vocab_size, seed)]
    for request in requests:
        llm.engine.add(request)
    start = first = now = 0.0
    before = after = 0
    while llm.engine.busy:
        llm.engine.step()
        now, counts = time.perf_counter(), [len(r.sampled) for r in requests]
        if start == 0.0 and min(counts) >= 3:
            start, before = now, sum(counts)
        if start and first == 0.0 and max(counts) >= tokens_out:
            first, after = now, sum(counts)
    return first - start, after - before


def first_token(llm: LLM, length: int, seed: int) -> float:
    """Seconds from arrival to the first token of one request alone."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    [prompt] = prompts(1, length, llm.model.config.vocab_size, seed)
    return llm.generate([prompt], params)[0].time_to_first_token


def measure(layout: str, args: argparse.Namespace) -> None:
    start, sizes, job = time.perf_counter(), sorted({1, *args.batches}), parse(layout)
    replicas, stages = job.get("dp_attention", 1), job.get("pp", 1)
    # requests of one replica, and of one of the steps that stages take at once
    each = sorted({-(-size // share) for size in sizes for share in (replicas, replicas * stages)})
    options = {
        "max_seqs": max(each),
        "max_len": max(CONTEXT, *args.prefills) + args.tokens_out + 64,
        "prefill_chunk": 8192,
    }
    options["ops"] = dict(item.split("=") for item in args.op)
    options["fusion"] = FusionConfig(kda=args.fusion, mla=args.fusion)
    arm = ", ".join([layout, *args.op, *([] if args.fusion == "auto" else [args.fusion])])
    with LLM(CONFIG, load_format="dummy", prefix_cache=False, graph_sizes=each, **options, **job) as llm:
        print(f"{layout}: loaded in {time.perf_counter() - start:.0f} s; {llm.memory}", flush=True)
        where, repeats = provenance(), range(args.repeats)
        for length in args.prefills:
            first_token(llm, length, 7)
            ttft = [first_token(llm, length, 8 + i) * 1e6 for i in repeats]
            print(f"{layout}: TTFT of {length}: {', '.join(f'{us / 1e3:.1f}' for us in ttft)} ms", flush=True)
            case = {"prefill": length, "dtype": "bfloat16"}
            row = {"bench": "layouts", "case": case, "arm": arm, "us": ttft, "us_median": statistics.median(ttft)}
            append_row(RESULTS, where | row)
        for batch in args.batches:
            runs = [decode(llm, batch, args.tokens_out, i) for i in repeats]
            rates = [tokens / seconds for seconds, tokens in runs]
            tpot = [batch / rate * 1e6 for rate in rates]
            shown = ", ".join(f"{us / 1e3:.2f}" for us in tpot)
            print(f"{layout}: batch {batch:4d}: TPOT {shown} ms, {statistics.median(rates):.0f} tok/s", flush=True)
            row = {
                "bench": "layouts",
                "case": {"batch": batch, "context": CONTEXT, "out": args.tokens_out, "dtype": "bfloat16"},
                "arm": arm,
                "us": tpot,
                "us_median": statistics.median(tpot),
                "tokens_per_s": rates,
                "graph_replays": dict(llm.engine.runner.graph_replays),
                "eager_steps": dict(llm.engine.runner.eager_steps),
            }
            append_row(RESULTS, where | row)


def short_config(directory: Path) -> Path:
    """The same shapes with the first layers alone."""
    config = json.loads(CONFIG.read_text())
    config["num_hidden_layers"] = LAYERS
    kinds = config["linear_attn_config"]
    for name in ("kda_layers", "full_attn_layers"):
        kinds[name] = [i for i in kinds[name] if i <= LAYERS]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def answers(layout: str, short: bool, out: Path) -> None:
    """Write what one layout says to a few prompts of different lengths: tokens, and log probabilities of both."""
    with tempfile.TemporaryDirectory() as name:
        model, dtype = (short_config(Path(name)), "float32") if short else (CONFIG, "bfloat16")
        options = {"max_seqs": 8, "max_len": 512, "graph_sizes": [1, 4, 8], "dtype": dtype}
        with LLM(model, load_format="dummy", deterministic=True, **options, **parse(layout)) as llm:
            vocab = llm.model.config.vocab_size
            asked = [prompts(1, n, vocab, n)[0] for n in (1, 5, 64, 65, 130, 300)]
            params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
            outputs = llm.generate(asked, params)
            document = {
                "tokens": [o.outputs[0].token_ids for o in outputs],
                "logprobs": [o.outputs[0].logprobs for o in outputs],
                "prompt_logprobs": [[p for p, _ in o.prompt_logprobs[1:]] for o in outputs],
                "graph_replays": dict(llm.engine.runner.graph_replays),
            }
    out.write_text(json.dumps(document))


def compare(want: dict, got: dict) -> dict:
    """How two layouts differ: bits, tokens, and log probabilities of tokens that were given."""
    pairs = zip(want["prompt_logprobs"], got["prompt_logprobs"], strict=True)
    gaps = [abs(a - b) for x, y in pairs for a, b in zip(x, y, strict=True)]
    tokens = [(a, b) for x, y in zip(want["tokens"], got["tokens"], strict=True) for a, b in zip(x, y, strict=True)]
    names = ("tokens", "logprobs", "prompt_logprobs")
    return {
        "bitwise": all(want[name] == got[name] for name in names),
        "tokens_equal": sum(a == b for a, b in tokens),
        "tokens": len(tokens),
        "answers_equal": sum(a == b for a, b in zip(want["tokens"], got["tokens"], strict=True)),
        "logprob_gap_mean": statistics.mean(gaps),
        "logprob_gap_max": max(gaps),
        "given_tokens": len(gaps),
    }


def equality(layouts: list[str], seconds: float) -> None:
    where = provenance()
    for short in (True, False):
        found = {}
        for layout in layouts:
            with tempfile.NamedTemporaryFile(suffix=".json") as file:
                extra = ["--answers", file.name, *(["--short"] if short else [])]
                if run_one(layout, extra, seconds):
                    found[layout] = json.loads(Path(file.name).read_text())
        for layout in layouts[1:]:
            if layout in found and layouts[0] in found:
                result = compare(found[layouts[0]], found[layout])
                case = {"layers": LAYERS, "dtype": "float32"} if short else {"layers": 27, "dtype": "bfloat16"}
                print(f"{layout} against {layouts[0]}, {case}: {result}", flush=True)
                row = {"bench": "layouts_equality", "case": case, "arm": layout, "against": layouts[0]}
                append_row(RESULTS, where | row | {"equality": result})


def run_one(layout: str, extra: list[str], seconds: float) -> bool:
    """One layout in a process of its own; whether it succeeded."""
    command = [sys.executable, __file__, "--one", layout, *extra]
    start = time.perf_counter()
    try:
        status = subprocess.run(command, timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        status = f"no end within {seconds:g} s"
    print(f"{layout}: {time.perf_counter() - start:.0f} s, status {status}", flush=True)
    return status == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    layouts = ["tp=1", "tp=2", "tp=2,dp_attention=2,ep=2", "pp=2"]
    parser.add_argument("--layouts", nargs="*", default=layouts)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32, 128])
    parser.add_argument("--prefills", type=int, nargs="*", default=[CONTEXT, 8192], help="prompts alone, for TTFT")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tokens-out", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=150, help="most that one layout may take")
    parser.add_argument("--op", nargs="*", default=[], help="NAME=IMPLEMENTATION")
    parser.add_argument("--fusion", default="auto", help="path of both layer kinds")
    parser.add_argument("--equality", action="store_true", help="compare instead of measuring")
    parser.add_argument("--one", help="(internal) this layout, in this process")
    parser.add_argument("--answers", type=Path, help="(internal) write answers here")
    parser.add_argument("--short", action="store_true", help="(internal) eight layers in fp32")
    args = parser.parse_args()
    if args.one and args.answers:
        answers(args.one, args.short, args.answers)
    elif args.one:
        measure(args.one, args)
    elif args.equality:
        equality(args.layouts, args.seconds)
    else:
        numbers = [f"--repeats={args.repeats}", f"--tokens-out={args.tokens_out}", f"--fusion={args.fusion}"]
        numbers += ["--batches", *map(str, args.batches), "--prefills", *map(str, args.prefills)]
        numbers += ["--op", *args.op] if args.op else []
        for layout in args.layouts:
            run_one(layout, numbers, args.seconds)


if __name__ == "__main__":
    main()
