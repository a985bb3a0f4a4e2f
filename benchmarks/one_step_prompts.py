"""Time to first token of short prompts, in two forms that take turns on one model, with the prefix cache on.

A prompt that ends inside a page is one step, or is cut at the last page: a step of its own for the last few tokens
touches most experts once more. With `--behind`, new tokens behind a cached prefix are replayed from a graph or launched
eagerly; as that is about the host's time for a whole model, take `--layers 27 --tokens 100`. Layers of the
Kimi-Linear-48B shape with dummy weights.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from common import ROOT, append_row, provenance

from anabranch import LLM, SamplingParams

CONFIG = ROOT / "tests/data/configs/kimi_linear_48b_config.json"
RESULTS = ROOT / "benchmarks/results/prefill.jsonl"
SETTLED = 8  # prompts of each form that are not counted
FIRST = SamplingParams(temperature=0.0, max_tokens=1)


def cut_config(directory: Path, layers: int) -> Path:
    config = json.loads(CONFIG.read_text())
    kinds = config["linear_attn_config"]
    config["num_hidden_layers"] = layers
    for name in ("kda_layers", "full_attn_layers"):
        kinds[name] = [i for i in kinds[name] if i <= layers]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


class Bench:
    """One loaded model; `prompts` of each form count."""

    def __init__(self, llm: LLM, prompts: int) -> None:
        self.llm, self.prompts, self.rng = llm, prompts, random.Random(0)
        self.where = provenance(llm.engine.runner.device)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.llm.model.config.vocab_size) for _ in range(count)]

    def one_step(self, tokens: int) -> None:
        """A state saved on the way, or by a step that ends there."""
        scheduler = self.llm.engine.scheduler
        if not scheduler.saves:
            raise SystemExit("error: the kernels chosen here save no state on the way")
        arms = {"one step": True, "cut at the last page": False}
        self.compare({}, {name: partial(setattr, scheduler, "saves", saves) for name, saves in arms.items()}, tokens)
        scheduler.saves = True

    def behind(self, prefix: int, tokens: int) -> None:
        """The same cached prefix, which ends with a page, before other tokens each time."""
        runner, head = self.llm.engine.runner, self.tokens(prefix)
        graphs, before = runner.prompts, runner.prompt_replays.total()
        self.llm.generate([head], FIRST)
        arms = {"captured": graphs, "eager": None}
        take = {name: partial(setattr, runner, "prompts", chosen) for name, chosen in arms.items()}
        self.compare({"behind": prefix}, take, tokens, head)
        runner.prompts = graphs
        if runner.prompt_replays.total() - before < self.prompts:
            raise SystemExit(f"error: {tokens} tokens behind {prefix} are not replayed here")

    def compare(
        self, case: Mapping[str, int], arms: Mapping[str, Callable[[], None]], tokens: int, head: Sequence[int] = ()
    ) -> None:
        """So many new tokens behind `head`, each arm in turn: rows, and medians for people."""
        us: dict[str, list[float]] = {arm: [] for arm in arms}
        for i in range(self.prompts + SETTLED):
            for arm, take in arms.items():
                take()
                prompt = [*head, *self.tokens(tokens)]
                start = time.perf_counter()
                [output] = self.llm.generate([prompt], FIRST)
                if i >= SETTLED:
                    us[arm].append((time.perf_counter() - start) * 1e6)
                assert output.cached_tokens == len(head), f"{output.cached_tokens} of {len(head)} tokens were cached"
        case = {"tokens": tokens, **case, "layers": self.llm.model.config.layers, "prefix_cache": True}
        for arm, samples in us.items():
            print(f"{case}, {arm}: {median(samples) / 1e3:.2f} ms", flush=True)
            row = {"bench": "prefill", "case": case, "arm": arm, "us": samples, "us_median": median(samples)}
            append_row(RESULTS, self.where | row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tokens", type=int, nargs="*", default=[1000], help="of a prompt, or new ones behind a prefix"
    )
    parser.add_argument(
        "--behind", type=int, nargs="*", default=[], help="tokens of a cached prefix, whole pages of 64"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=32, help="of each form, behind a few that are not counted")
    args = parser.parse_args()
    max_len = max(4096, max(args.tokens) + max(args.behind, default=0) + 64)
    with tempfile.TemporaryDirectory() as place:
        options = {"load_format": "dummy", "max_seqs": 4, "max_len": max_len, "graph_sizes": [1, 4]}
        with LLM(cut_config(Path(place), args.layers), **options) as llm:
            bench = Bench(llm, args.prompts)
            for tokens in args.tokens:
                for prefix in args.behind:
                    bench.behind(prefix, tokens)
                if not args.behind:
                    bench.one_step(tokens)


if __name__ == "__main__":
    main()
