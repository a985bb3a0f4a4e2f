"""One rank's four-layer slice (3 KDA + 1 MLA, FFNs included) of a layout, by projection path, on one GPU.

Real layers at true per-rank shapes, CUDA-graph replay, A/A first, arms in turn behind a correctness gate, weights cold
(a slice reads more than the L2 holds). Collectives are NOT executed: their bytes and a modelled time are printed and
kept apart and are in no wall time; sums keep this rank's part, rows of other replicas are random. Weights are in the
format of the config (Kimi-K3: MXFP4 experts); `--plain-experts` keeps experts in the model dtype.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from common import ROOT, append_row, provenance

from anabranch.config.hf import load_model_config
from anabranch.measure.path_arms import all_arms
from anabranch.measure.simulated_peers import LinkModel
from anabranch.measure.slice import Slice
from anabranch.measure.slice_times import time_slice
from anabranch.models.load import device_of, dtype_of
from anabranch.parallel.layout import Layout

CONFIGS, RESULTS = ROOT / "tests/data/configs", ROOT / "benchmarks/results/slice.jsonl"
CASES = {
    "k3-tp8": ("kimi_k3_config.json", Layout(tp=8)),
    "k3-dep16": ("kimi_k3_config.json", Layout(tp=16, dp_attention=16, ep=16)),
    "kl-tp1": ("kimi_linear_48b_config.json", Layout()),
}


def bench(name: str, path: Path, layout: Layout, args: argparse.Namespace, where: dict) -> None:
    config = load_model_config(path)
    if args.plain_experts:
        config = replace(config, expert_format="plain")
    device = device_of(args.device)
    ops = dict(item.split("=") for item in args.op)
    dtype = dtype_of("auto", config.dtype, device)
    for rows in args.rows:
        subject = Slice(config, layout, device=device, dtype=dtype, rows=rows, context=args.context, ops=ops)
        names = args.arms or all_arms(subject.config, subject.model.plan)
        link = LinkModel(efficiency=args.link_efficiency, latency_us=args.link_latency_us)
        traces = args.traces and args.traces / f"{name}-{rows}"
        if traces:
            traces.mkdir(parents=True, exist_ok=True)
        result = time_slice(subject, names, link, traces)
        print(f"{name}:", *result.lines(), sep="\n", flush=True)
        if args.table:
            for arm, launches in result.launches.items():
                print(f" {arm}: where a slice goes", *launches.lines(), sep="\n", flush=True)
        for row in result.rows():
            append_row(args.append, where | row | {"case": {"layout": name} | row["case"]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--config", type=Path, help="another config.json, with --tp, --dp-attention and --ep")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dp-attention", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="*", default=[32], help="requests of this rank's replica")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--arms", nargs="*", default=[], help="KDA path, or KDA+MLA; default: all that are legal")
    parser.add_argument("--op", nargs="*", default=[], help="NAME=IMPLEMENTATION")
    parser.add_argument("--plain-experts", action="store_true")
    parser.add_argument("--link-efficiency", type=float, default=LinkModel().efficiency)
    parser.add_argument("--link-latency-us", type=float, default=LinkModel().latency_us)
    parser.add_argument("--table", action="store_true", help="also where a slice goes, kernel by kernel")
    parser.add_argument("--traces", type=Path, help="folder for a recording of each arm, for `anabranch trace`")
    parser.add_argument("--append", type=Path, default=RESULTS)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    cases = {name: (CONFIGS / CASES[name][0], CASES[name][1]) for name in args.cases}
    if args.config:
        cases = {args.config.parent.name: (args.config, Layout(tp=args.tp, dp_attention=args.dp_attention, ep=args.ep))}
    where = provenance(device_of(args.device))
    torch.manual_seed(0)
    with torch.inference_mode():
        for name, (path, layout) in cases.items():
            bench(name, path, layout, args, where)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
