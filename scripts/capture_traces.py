"""Small recordings of decode steps on this GPU, for tests/data/traces: each beside what is expected of its reader.

    python scripts/capture_traces.py OUT --prefix h200_k3

By default a Kimi-K3 of eight layers at the widths of one of eight ranks, experts and vocabulary included, with dummy
weights: KDA paths `separate` and `whole` by graph replay, and `whole` eager. Prompts run kernels that need no tuning: a
recording has none of them. OUT gets NAME.json.gz, which keeps only the fields that
anabranch/evidence/trace/chrome.py reads, and NAME.expect.json: launches by name, and in the commonest stretch from one
marker to the next, counted here from the JSON alone. A recording that contradicts itself is refused.
"""

import argparse
import gzip
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parents[1] / "tests/data/configs/kimi_k3_config.json"
GPU = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
KEPT = ("ph", "cat", "name", "pid", "tid", "ts", "dur")
ARGUMENTS = ("correlation", "device", "stream", "graph node id", "graph_node_id", "graphNodeId")
PATTERNS = ("kda_step", "mla", "skinny|low_rank", "nvjet|gemm|cutlass", "expert", "norm", "Memcpy", "Memset", ".")
MARKER, STEP = "kda_step", "^decode step$"
MOST_BYTES = 150_000
RANKS = 8  # whose share of heads, widths and vocabulary the cut model has
# fla-core would tune itself for over a minute, cuDNN plans for seconds
OPS = {"kda_prefill": "chunked", "mla_prefill": "sdpa"}
PROMPT = 16
# name, KDA path, eager
TRACES = (("decode_separate", "separate", False), ("decode_whole", "whole", False), ("eager_whole", "whole", True))
Row = dict[str, Any]


def cut_config(raw: Row, layers: int = 8, experts: int = 32) -> Row:
    """Kimi-K3's config.json with fewer layers and experts, and what one of eight ranks has of each of them."""
    text = dict(raw["text_config"])
    heads = text["num_attention_heads"] // RANKS
    mla = [n for n in range(1, layers + 1) if n % 4 == 0]
    kda = [n for n in range(1, layers + 1) if n % 4]
    text["linear_attn_config"] = text["linear_attn_config"] | {
        "full_attn_layers": mla,
        "kda_layers": kda,
        "num_heads": heads,
    }
    text |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads}
    text |= {"num_experts": experts, "attn_res_block_size": 4, "eos_token_id": 1, "bos_token_id": 0}
    for name in ("intermediate_size", "moe_intermediate_size", "vocab_size"):
        text[name] //= RANKS
    return raw | {"text_config": text}


def record(llm: Any, steps: int, prompt: int = PROMPT, before: int = 4) -> Row:
    """torch.profiler's document of `steps` decode steps of one request, each in a range of its own."""
    import torch

    from anabranch import SamplingParams

    vocab = llm.model.config.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=before + steps + 8, ignore_eos=True)
    request = llm.request([(7 * i + 3) % vocab for i in range(prompt)], params)
    llm.engine.add(request)
    while len(request.sampled) < before:
        llm.engine.step()
    wait: Callable[[], object] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    # the first profile of a process also starts the tracing library
    for count in (1, steps):
        wait()
        with torch.profiler.profile() as profile:
            for _ in range(count):
                with torch.profiler.record_function("decode step"):
                    llm.engine.step()
            wait()
    llm.engine.abort(request)
    with tempfile.TemporaryDirectory() as place:
        profile.export_chrome_trace(f"{place}/trace.json")
        return json.loads(Path(place, "trace.json").read_text(), parse_float=Decimal)


def trimmed(document: Row) -> Row:
    """What a reader needs: device operations, the calls that launched them, and the ranges of the steps."""
    rows = [row for row in document["traceEvents"] if row.get("ph") == "X"]
    launched = {_correlation(row) for row in rows if row.get("cat") in GPU}
    wanted = [
        row
        for row in rows
        if row.get("cat") in GPU
        or (row.get("cat") in CALLS and _correlation(row) in launched)
        or (row.get("cat") == "user_annotation" and re.search(STEP, row["name"]))
    ]
    devices = [{"id": d["id"], "name": d["name"]} for d in document.get("deviceProperties", [])]
    return {
        "schemaVersion": document.get("schemaVersion", 1),
        "deviceProperties": devices,
        "traceEvents": [_kept(row) for row in wanted],
    }


def _kept(row: Row) -> Row:
    arguments = {name: row["args"][name] for name in ARGUMENTS if name in row.get("args", {})}
    return {name: row[name] for name in KEPT if name in row} | {"args": arguments}


def _correlation(row: Row) -> int | None:
    return row.get("args", {}).get("correlation")


def text_of(document: Row) -> str:
    """JSON whose numbers have the digits that they were recorded with."""
    text = json.dumps(document, separators=(",", ":"), default=lambda number: f"@{number}@")
    return re.sub(r'"@([-+0-9.Ee]+)@"', r"\1", text)


def expected(document: Row, marker: str = MARKER) -> Row:
    """What the tests hold a reader to. ValueError: the recording has no steps, or no commonest stretch."""
    rows = document["traceEvents"]
    events = sorted((row for row in rows if row["cat"] in GPU), key=lambda row: (row["ts"], row["ts"] + row["dur"]))
    counts = {p: sum(bool(re.search(p, row["name"])) for row in events) for p in PATTERNS}
    says: Row = {"counts": {pattern: number for pattern, number in counts.items() if number}}
    if document["deviceProperties"]:
        says["device"] = document["deviceProperties"][0]["name"]
    steps, by_graph = _steps(rows, events)
    if not by_graph:
        says["step"] = STEP
    stretches = Counter(kind for step in steps for kind in _stretches(step, marker))
    first, *rest = stretches.most_common(2) or [(None, 0)]
    if first[0] is None or (rest and rest[0][1] == first[1]):
        raise ValueError(f"{len(steps)} steps have no commonest stretch from {marker!r} to the next")
    return says | {"slice": {"marker": marker, "launches": sum(number for _, number in first[0])}}


def _steps(rows: Iterable[Row], events: list[Row]) -> tuple[list[list[Row]], bool]:
    """Device operations of each step, and whether a step is a graph replay: else what a range launched."""
    calls = {_correlation(row): row for row in rows if row["cat"] in CALLS}
    replays: dict[int | None, list[Row]] = {}
    for event in events:
        if "GraphLaunch" in calls.get(_correlation(event), {"name": ""})["name"]:
            replays.setdefault(_correlation(event), []).append(event)
    if replays:
        largest = max(map(len, replays.values()))
        return [replay for replay in replays.values() if len(replay) == largest], True
    ranges = [row for row in rows if row["cat"] == "user_annotation"]
    inside = [[e for e in events if _in(calls.get(_correlation(e)), span)] for span in ranges]
    return [step for step in inside if step], False


def _in(call: Row | None, span: Row) -> bool:
    return call is not None and span["ts"] <= call["ts"] < span["ts"] + span["dur"]


def _stretches(step: list[Row], marker: str) -> list[frozenset[tuple[str, int]]]:
    """Names and numbers of launches from one marker to just before the next."""
    at = [i for i, row in enumerate(step) if re.search(marker, row["name"])]
    return [frozenset(Counter(row["name"] for row in step[a:b]).items()) for a, b in pairwise(at)]


def check(document: Row, says: Mapping[str, Any], kda_layers: int, steps: int) -> None:
    """ValueError unless one decode kernel ran for each KDA layer and step, and every step was recorded."""
    found, want = says["counts"].get(MARKER, 0), kda_layers * steps
    ranges = sum(row["cat"] == "user_annotation" for row in document["traceEvents"])
    if found != want or ranges != steps:
        wanted = f"{steps} steps of {kda_layers} layers are {want}"
        raise ValueError(f"{found} launches of {MARKER} in {ranges} ranges; {wanted}")


def save(document: Row, says: Row, out: Path, name: str) -> int:
    """Write both files; bytes of the recording. ValueError: larger than what is committed."""
    data = gzip.compress(text_of(document).encode(), mtime=0)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{name}: {len(data)} bytes, more than {MOST_BYTES}; record fewer --steps")
    (out / f"{name}.json.gz").write_bytes(data)
    (out / f"{name}.expect.json").write_text(json.dumps(says, indent=1) + "\n")
    return len(data)


def capture(model: Path, out: Path, prefix: str, steps: int) -> None:
    """All of TRACES; prints how long each part took."""
    from anabranch import FusionConfig

    for name, path, eager in TRACES:
        start = time.monotonic()
        llm = engine(model, FusionConfig(kda=path), eager)
        built = time.monotonic()
        recorded = record(llm, steps)
        ended = time.monotonic()
        document = trimmed(recorded)
        says = expected(document)
        check(document, says, llm.model.config.layer_count("kda"), steps)
        size = save(document, says, out, f"{prefix}_{name}")
        done = time.monotonic()
        spent = f"built in {built - start:.1f} s, recorded in {ended - built:.1f}, written in {done - ended:.1f}"
        print(f"{prefix}_{name}: {size} bytes, {spent}\n  {json.dumps(says)}", flush=True)
        for kernel, number in Counter(r["name"] for r in document["traceEvents"] if r["cat"] in GPU).most_common():
            print(f"  {number:5} {kernel[:120]}")
        del llm


def engine(model: Path, fusion: Any, eager: bool) -> Any:
    """An LLM whose warm-up compiles little but what a recording holds: a short prompt, one request, one graph."""
    import torch

    from anabranch import LLM

    torch.cuda.empty_cache()
    return LLM(model, load_format="dummy", max_seqs=1, max_len=128, prefill_chunk=PROMPT, prefix_cache=False, ops=OPS,
               eager=eager, fusion=fusion)  # fmt: skip


def build_kernels() -> None:
    """The CUDA C++ ones, before any clock runs; minutes of nvcc unless they were built before."""
    from anabranch.ops import native

    for folder in ("skinny_gemm", "kda_step"):
        start, verdict = time.monotonic(), native.verdict(folder)
        if verdict.ok:
            native.load(folder)
        print(f"{folder}: {verdict.reason}, {time.monotonic() - start:.1f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder, made if need be")
    parser.add_argument("--model", type=Path, help="config.json of another model; weights are dummies")
    parser.add_argument("--prefix", default="h200_k3")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("needs a CUDA GPU, this machine has none", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    build_kernels()
    with tempfile.TemporaryDirectory() as place:
        model = options.model or Path(place, "config.json")
        if options.model is None:
            model.write_text(json.dumps(cut_config(json.loads(CONFIG.read_text()))))
        capture(model, options.out, options.prefix, options.steps)
    print(f"all in {time.monotonic() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
