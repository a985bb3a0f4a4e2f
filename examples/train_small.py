"""Train the small Kimi-K3 of checkpoints/small-k3: `python examples/train_small.py --data FILE --out DIR --minutes 4`.

FILE is written by `python -m training.data` (in examples/). On a GPU it needs the package `fla` (fla-core) for the KDA
recurrence; on a CPU it runs, slowly, with --minimal. The learning rate follows the wall clock, so --minutes is the time
of the whole run, with compilation. The checkpoint is written once a minute; rows go to train_small.jsonl.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch

from anabranch.config.hf import parse_model_config
from anabranch.measure.rows import ROOT, append_row, provenance
from anabranch.models.inventory import count_parameters

sys.path.insert(0, str(Path(__file__).parent))  # also where this file is loaded by a test

from training.config import minimal_config, small_config
from training.data import Rows
from training.export import export
from training.model import Trainable
from training.optimizer import Optimizer
from training.step import WARM_UP, Step, side_stream

RESULTS = ROOT / "benchmarks" / "results" / "train_small.jsonl"
HELD_OUT = ("problems_held_out", "text_held_out")
BALANCE, WARM_STEPS, COOL_DOWN = 2e-3, 150, 0.5  # bias step; steps of warm-up; share of the time that cools down


class Run:
    """Model, data and clock of one training run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.start = options, time.perf_counter()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.raw = minimal_config() if options.minimal else small_config()
        config = parse_model_config(self.raw)
        on_gpu = self.device.type == "cuda"
        self.compiled = on_gpu and not options.no_compile
        self.model = Trainable(
            config, options.rows, options.length,
            dtype=torch.bfloat16 if on_gpu else torch.float32, device=self.device, compiled=self.compiled,
            fla=on_gpu and not options.no_fla,
        )  # fmt: skip
        self.model.initialise(options.seed)
        self.parameters = count_parameters(config)
        self.rows = Rows.load(options.data, options.rows, options.length, self.device)
        self.step = Step(self.model, Optimizer(self.model), self.rows, compiled=self.compiled)
        self.random = np.random.default_rng(options.seed)
        self.steps, self.learning = 0, 0.0  # seconds before the first timed step are compilation

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def rates(self) -> tuple[float, float]:
        """Learning rate and bias step now: warm-up by steps, flat, then to zero by the clock."""
        left = max(0.0, 1 - self.seconds / (60 * self.options.minutes))
        cooling = min(1.0, left / COOL_DOWN)
        return self.options.rate * cooling * min(1.0, (self.steps + 1) / WARM_STEPS), BALANCE * cooling

    def advance(self) -> None:
        self.rows.choose(self.random)
        self.step(*self.rates())
        self.steps += 1

    def prepare(self) -> None:
        """The eager steps, in which everything is compiled and tuned, and the capture."""
        side_stream(lambda: [self.advance() for _ in range(WARM_UP)] and None)
        self.say(f"{WARM_UP} eager steps")
        self.evaluate(1)
        if self.device.type == "cuda" and not self.options.no_graph:
            self.step.capture()
            self.say("captured")

    def evaluate(self, batches: int) -> dict[str, float]:
        """Held-out bits a byte of each stream, over the same rows every time."""
        found = {}
        for name in HELD_OUT:
            generator, losses = np.random.default_rng(0), []
            for _ in range(batches):
                self.rows.choose(generator, held_out=name)
                losses.append(self.step.evaluate())
            found[name] = float(torch.stack(losses).mean()) / math.log(2)
        return found

    def report(self, since: tuple[int, float], batches: int) -> tuple[int, float]:
        """Print and append one row; returns where the next stretch starts."""
        loss = float(self.step.loss)  # waits for the steps behind it
        steps, seconds = self.steps - since[0], self.seconds - since[1]
        per_step = self.options.rows * self.options.length
        load = self.model.load
        row = {
            "bench": "train_small",
            "case": {"parameters": self.parameters, "rows": self.options.rows, "length": self.options.length},
            "data": self.rows.about,
            "step": self.steps,
            "seconds": round(self.seconds, 1),
            "rate": self.rates()[0],
            "loss": loss,
            "held_out_bits_per_byte": self.evaluate(batches),
            "tokens": self.steps * per_step,
            "tokens_per_s": round(steps * per_step / seconds),
            "gradient_norm": float(self.step.optimizer.norm),
            "expert_load": [float(load.min() / load.mean()), float(load.max() / load.mean())],
            **provenance(self.device),
        }
        append_row(RESULTS, row)
        shown = {k: row[k] for k in ("step", "seconds", "loss", "held_out_bits_per_byte", "tokens_per_s")}
        self.say(json.dumps(shown | {k: row[k] for k in ("gradient_norm", "expert_load")}))
        return self.steps, self.seconds

    def say(self, text: str) -> None:
        print(f"[{self.seconds:6.1f} s] {text}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    run = Run(options)
    run.say(f"{run.parameters:,} parameters on {run.device}")
    run.prepare()
    since, saved = (run.steps, run.seconds), run.seconds
    while run.seconds < 60 * options.minutes and run.steps < options.steps:
        run.advance()
        if run.steps % 10 == 0:
            float(run.step.loss)  # keeps the host within a few steps of the device
        if run.seconds - since[1] > options.report_every:
            since = run.report(since, batches=4)
            if not math.isfinite(float(run.step.loss)):
                print("the loss is not finite: stopped; the last checkpoint stays")
                return 1
        if run.seconds - saved > 60:
            export(run.model, run.raw, options.out)
            saved = run.seconds
    run.report(since, batches=16)
    export(run.model, run.raw, options.out)
    run.say(f"{options.out}: written after {run.steps} steps")
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="written by training.data")
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--minutes", type=float, default=4.0, help="of the whole run, start and compilation included")
    parser.add_argument("--steps", type=int, default=10**9, help="stop after so many")
    parser.add_argument("--rows", type=int, default=16, help="sequences a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--report-every", type=float, default=15.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minimal", action="store_true", help="the configuration of the tests")
    parser.add_argument("--no-compile", action="store_true", help="elementwise operations as they are")
    parser.add_argument("--no-fla", action="store_true", help="the package's chunk reference on a GPU: far slower")
    parser.add_argument("--no-graph", action="store_true", help="no CUDA graph")
    options = parser.parse_args(arguments)
    for name in ("minutes", "steps", "rows", "length", "rate", "report_every"):
        if not getattr(options, name) > 0:
            parser.error(f"--{name.replace('_', '-')}={getattr(options, name)}: need more than 0")
    return options


if __name__ == "__main__":
    sys.exit(main())
