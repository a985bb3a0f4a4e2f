"""Time to first token of a prompt that ends inside a page, with the prefix cache on: one step, or cut at the last page.

Eight layers of the Kimi-Linear-48B shape with dummy weights; both forms take turns on one model. A step of its own for
the last few tokens touches most experts once more.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from statistics import median

from common import ROOT, append_row, provenance

from anabranch import LLM, SamplingParams

CONFIG = ROOT / "tests/data/configs/kimi_linear_48b_config.json"
LAYERS, SETTLED = 8, 8
ARMS = {"one step": True, "cut at the last page": False}


def short_config(directory: Path) -> Path:
    config = json.loads(CONFIG.read_text())
    kinds = config["linear_attn_config"]
    config["num_hidden_layers"] = LAYERS
    for name in ("kda_layers", "full_attn_layers"):
        kinds[name] = [i for i in kinds[name] if i <= LAYERS]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=32, help="of each form, behind a few that are not counted")
    args = parser.parse_args()
    rng, first = random.Random(0), SamplingParams(temperature=0.0, max_tokens=1)
    us: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as place:
        options = {"load_format": "dummy", "max_seqs": 4, "max_len": 4096, "graph_sizes": [1, 4]}
        with LLM(short_config(Path(place)), **options) as llm:
            if not llm.engine.scheduler.saves:
                raise SystemExit("error: the kernels chosen here save no state on the way")
            for i in range(args.prompts + SETTLED):
                for arm, saves in ARMS.items():
                    llm.engine.scheduler.saves = saves
                    prompt = [rng.randrange(llm.model.config.vocab_size) for _ in range(args.tokens)]
                    start = time.perf_counter()
                    llm.generate([prompt], first)
                    if i >= SETTLED:
                        us[arm].append((time.perf_counter() - start) * 1e6)
            where = provenance(llm.engine.runner.device)
    case = {"tokens": args.tokens, "layers": LAYERS, "prefix_cache": True}
    for arm, samples in us.items():
        print(f"{args.tokens} tokens, {LAYERS} layers, {arm}: {median(samples) / 1e3:.2f} ms")
        row = {"bench": "prefill", "case": case, "arm": arm, "us": samples, "us_median": median(samples)}
        append_row(ROOT / "benchmarks/results/prefill.jsonl", where | row)


if __name__ == "__main__":
    main()
