"""Time per output token of `anabranch serve`, through HTTP, beside that of the same model in process.

    python scripts/served_tpot.py tests/data/configs/kimi_linear_48b_config.json --concurrency 1,32,128

Weights are dummies, prompts are random token ids: no tokenizer is needed. First `anabranch bench decode-step` in a
process of its own (or rows of one, `--in-process FILE`), then a server under `anabranch bench serve`, which is ended
afterwards. The requests of a burst come together and no other follows, as in process, so that both means hold the same
waits for the prompts of others. Rows: serve.jsonl.
"""

import argparse
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks/results/serve.jsonl"
WHERE = ("device", "commit", "arm")
Row = dict[str, Any]


def anabranch(*words: object) -> list[str]:
    """The command line, also where no console script is installed."""
    return [sys.executable, "-c", "from anabranch.cli.main import run; run()", *map(str, words)]


def asked(*words: object) -> Row:
    """The document on the last line of a verb's output."""
    done = subprocess.run(anabranch(*words), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"error: anabranch {' '.join(map(str, words))} ended with status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def in_process(model: Path, args: argparse.Namespace) -> dict[int, Row]:
    """Rows of bench decode-step by batch, of these experts: read from a file, the newest of each, or measured now."""
    if args.in_process is not None:
        rows = [json.loads(line) for line in args.in_process.read_text().splitlines()]
    else:
        words = ["--batches", ",".join(map(str, args.concurrency)), "--repeats", args.repeats, *args.model_options]
        lengths = ["--tokens-in", args.tokens_in, "--tokens-out", args.tokens_out]
        document = asked("bench", "decode-step", model, *words, *lengths)
        rows = [{name: document.get(name) for name in WHERE} | row for row in document["rows"]]
    from anabranch.config.hf import load_model_config

    experts = load_model_config(model / "config.json").expert_format
    wanted = {"context": args.tokens_in, "out": args.tokens_out, "experts": experts}
    found = {
        row["case"]["batch"]: row
        for row in rows
        if row.get("bench") == "decode_step" and "request_tpot_ms" in row and wanted.items() <= row["case"].items()
        if "state=" not in row["arm"]  # the server keeps its states in fp32
    }
    if missing := [n for n in args.concurrency if n not in found]:
        sys.exit(f"error: {args.in_process}: no decode_step row of batch {missing[0]}, {wanted}")
    return found


@contextmanager
def server(model: Path, args: argparse.Namespace, log: Path) -> Iterator[str]:
    """The address of a server that answers, ended by SIGTERM."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sizes, most = ",".join(map(str, args.concurrency)), max(args.concurrency)
    words = ["--port", port, "--load-format", "dummy", "--max-seqs", most, "--graph-sizes", sizes, "--no-prefix-cache"]
    words += args.model_options
    with log.open("w") as file:
        process = subprocess.Popen(anabranch("serve", model, *words), stdout=file, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + args.start_timeout
        while not _healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                tail = "\n".join(log.read_text().splitlines()[-15:])
                sys.exit(f"error: the server ended or does not answer; its last words:\n{tail}")
            time.sleep(0.5)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def served(url: str, concurrency: int, args: argparse.Namespace) -> list[Row]:
    """A document of bench serve for each burst of `concurrency` requests."""
    lengths = ["--random-input-len", args.tokens_in, "--random-output-len", args.tokens_out]
    load = ["--num-prompts", concurrency, "--max-concurrency", concurrency]
    bursts = []
    for i in range(args.repeats):
        # the first burst of a size comes twice: kernels that this size is the first to need are loaded
        warm = ["--num-warmups", 1 if i else concurrency, "--seed", i]
        bursts.append(asked("bench", "serve", "--base-url", url, *lengths, *load, *warm))
    for burst in bursts:
        if burst["completed"] != concurrency:
            sys.exit(f"error: {burst['completed']} of {concurrency} requests were answered")
    return bursts


def compared(concurrency: int, bursts: list[Row], inside: Row, where: Row) -> Row:
    """The result row. `tpot_ms`: mean over requests; `median_itl_ms`: a step in which nobody's prompt is computed."""
    tpot, itl = ([burst[f"{name}_ms"] for burst in bursts] for name in ("mean_tpot", "median_itl"))
    case = {"concurrency": concurrency} | {name: inside["case"][name] for name in ("context", "out", "dtype")}
    over = {
        "tpot_over_in_process_pct": (mean(tpot) / mean(inside["request_tpot_ms"]) - 1) * 100,
        "step_over_in_process_pct": None if None in itl else (mean(itl) / mean(inside["tpot_ms"]) - 1) * 100,
    }
    return where | {
        "device": inside["device"],
        "arm": inside["arm"],
        "in_process_commit": inside["commit"],
        "bench": "serve",
        "case": case,
        "us": [ms * 1e3 for ms in tpot],
        "us_median": mean(tpot) * 1e3,
        "tpot_ms": tpot,
        "median_itl_ms": itl,
        "mean_ttft_ms": [burst["mean_ttft_ms"] for burst in bursts],
        "output_throughput": [burst["output_throughput"] for burst in bursts],
        "client_lag_ms": [burst["client_lag_ms"] for burst in bursts],
        "token_basis": bursts[0]["token_basis"],
        "in_process_request_tpot_ms": inside["request_tpot_ms"],
        "in_process_tpot_ms": inside["tpot_ms"],
        **over,
    }


def show(row: Row) -> None:
    def told(values: list[float | None]) -> str:
        return ", ".join("-" if value is None else f"{value:.2f}" for value in values)

    step = row["step_over_in_process_pct"]
    print(
        f"concurrency {row['case']['concurrency']:4d}: TPOT served {told(row['tpot_ms'])} ms, in process "
        f"{told(row['in_process_request_tpot_ms'])} ({row['tpot_over_in_process_pct']:+.1f} %); steady step served "
        f"{told(row['median_itl_ms'])}, in process {told(row['in_process_tpot_ms'])} "
        f"({'-' if step is None else f'{step:+.1f} %'}); first token {told(row['mean_ttft_ms'])} ms",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="config.json; weights are dummies")
    parser.add_argument("--concurrency", default="1,32,128", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--tokens-in", type=int, default=1024)
    parser.add_argument("--tokens-out", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2, help="bursts of each size")
    parser.add_argument("--in-process", type=Path, help="decode_step.jsonl to compare with, instead of measuring now")
    parser.add_argument("--prefill-chunk", type=int, default=16384)
    parser.add_argument("--max-len", type=int, default=36864, help="that cache and graphs are made for")
    parser.add_argument("--memory-fraction", type=float, default=0.92)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--op", nargs="*", default=[], help="NAME=IMPLEMENTATION, for both")
    parser.add_argument("--start-timeout", type=float, default=400.0, help="seconds until the server must answer")
    parser.add_argument("--append", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.model_options = ["--device", args.device, "--prefill-chunk", args.prefill_chunk, "--max-len", args.max_len]
    args.model_options += ["--memory-fraction", args.memory_fraction]
    args.model_options += [word for op in args.op for word in ("--op", op)]
    import torch

    from anabranch.measure.rows import append_row, provenance

    where = provenance(torch.device("cpu"))  # this process must not hold memory of the GPU

    with tempfile.TemporaryDirectory() as place:
        model = Path(place, "model")
        model.mkdir()
        shutil.copy(args.config, model / "config.json")
        inside = in_process(model, args)
        with server(model, args, Path(place, "server.log")) as url:
            for concurrency in args.concurrency:
                row = compared(concurrency, served(url, concurrency, args), inside[concurrency], where)
                show(row)
                append_row(args.append, row)


if __name__ == "__main__":
    main()
