"""Measure the small model: `python examples/score_small.py checkpoints/small-k3`; --card writes its model card too.

Word problems solved and held-out bits per byte, in fp32 on a CPU or in the checkpoint's dtype on a GPU; with
--mxfp4-experts and --state-dtype bfloat16, what these formats cost. A row goes to
benchmarks/results/small_k3_score.jsonl. The card and loss.svg come from the last run in train_small.jsonl; pinned.json
gets the greedy tokens that a test compares.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from anabranch import LLM
from anabranch.measure.rows import ROOT, append_row, provenance
from anabranch.ops.mxfp4.reference import dequantize, quantize

sys.path.insert(0, str(Path(__file__).parent))  # also where this file is loaded by a test

from training.card import card, curve
from training.fixtures import sha256
from training.score import bits_per_byte, pinned_tokens, solved, tokens_per_s, word_test

RESULTS = ROOT / "benchmarks" / "results"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--limit", type=int, help="only the first problems")
    parser.add_argument("--show", type=int, default=2, help="answers to print")
    parser.add_argument("--rows", type=Path, default=RESULTS / "train_small.jsonl", help="rows of the training run")
    parser.add_argument("--mxfp4-experts", action="store_true", help="round the routed experts to MXFP4 first")
    parser.add_argument("--state-dtype", default="float32", help="of the recurrent state: float32 or bfloat16")
    parser.add_argument("--card", action="store_true", help="write README.md, loss.svg and pinned.json there")
    options = parser.parse_args(arguments)
    llm = LLM(options.checkpoint, state_dtype=options.state_dtype)
    if options.mxfp4_experts:
        round_experts(llm)
    formats = {"experts": "mxfp4" if options.mxfp4_experts else "plain", "state": options.state_dtype}
    test, start = word_test(options.checkpoint, options.limit), time.perf_counter()
    percent, answers = solved(llm, test)
    for question, answer in list(zip(test.questions, answers, strict=True))[: options.show]:
        print(f"Question: {question.question}\nAnswer:{answer}\n(right: {question.number})\n")
    score = {
        "bench": "small_k3_score",
        "case": {"problems": len(answers), "shots": len(test.shots), "dtype": str(llm.model.dtype)} | formats,
        "solved_pct": percent,
        "bits_per_byte": bits_per_byte(llm, options.checkpoint),
        "tokens_per_s": round(tokens_per_s(llm), 1),
        "problems_sha256": test.sha256,
        "weights_sha256": sha256(options.checkpoint / "model.safetensors"),
        "seconds": round(time.perf_counter() - start, 1),
        **provenance(next(llm.model.parameters()).device),
    }
    append_row(RESULTS / "small_k3_score.jsonl", score)
    print(json.dumps({key: score[key] for key in ("solved_pct", "bits_per_byte", "tokens_per_s", "seconds")}))
    if options.card:
        write_card(options.checkpoint, options.rows, score)
    return 0


def round_experts(llm: LLM) -> None:
    """Replace every routed expert's matrix by the nearest one that MXFP4 can hold."""
    weights = {name: w for name, w in llm.model.state_dict().items() if ".experts." in name and w.ndim == 2}
    llm.update_weights((name, dequantize(*quantize(w), w.dtype)) for name, w in weights.items())


def write_card(checkpoint: Path, rows_file: Path, score: dict) -> None:
    """README.md and loss.svg from the last run among the rows, and pinned.json."""
    rows = [json.loads(line) for line in rows_file.read_text(encoding="utf-8").splitlines()]
    # a run's clock starts at zero
    first = max(i for i, row in enumerate(rows) if i == 0 or row["seconds"] < rows[i - 1]["seconds"])
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    (checkpoint / "README.md").write_text(card(rows[-1], score, config), encoding="utf-8")
    (checkpoint / "loss.svg").write_text(curve(rows[first:]), encoding="utf-8")
    pins = {"weights_sha256": score["weights_sha256"], "tokens": pinned_tokens(checkpoint)}
    (checkpoint / "pinned.json").write_text(json.dumps(pins) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
