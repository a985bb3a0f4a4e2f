"""Projection paths against each other at the whole step, in one process, on the same requests and the same weights.

The merged buffers serve every path at run time, so each arm is only another set of graphs. Arms take turns within a
running batch, a few steps each, in the order A B B A: contexts that grow and clocks that drift meet both alike.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from typing import Any

from anabranch.engine.graphs import DecodeGraphs
from anabranch.engine.llm import LLM
from anabranch.fusion import counters
from anabranch.measure.decode_step import check_lengths
from anabranch.measure.path_arms import ModelPaths, PathArm, parse_arms
from anabranch.measure.whole_model import WaveTimer, add_requests

BLOCK = 8  # steps of an arm before the other one's turn
SKIPPED = 2  # of them, those that are not counted: one belongs to the turn before


@dataclass(frozen=True, kw_only=True, slots=True)
class PathTimes:
    """One batch size: for both arms the mean step of each of its turns, in us, in order of time."""

    batch: int
    tokens_in: int
    dtype: str
    turns: dict[str, list[float]]
    ran: dict[str, dict[str, int]]

    def mean_us(self, arm: str) -> float:
        return mean(self.turns[arm])

    @property
    def gain_pct(self) -> float:
        """By how much the second arm's step is shorter than the first one's."""
        first, second = self.turns
        return (1 - self.mean_us(second) / self.mean_us(first)) * 100

    @property
    def spread_pct(self) -> float:
        """A/A: what an arm's mean differs by between every other one of its turns and those between; the larger one's.

        Either half has turns at the beginning and the end, so it says how far this comparison can be off by chance.
        """
        halves = [(mean(t[::2]), mean(t[1::2])) for t in self.turns.values()]
        return max(abs(a - b) / ((a + b) / 2) * 100 for a, b in halves)

    @property
    def largest_apart_pct(self) -> float:
        """The largest difference of neighbouring turns of one arm, percent of its mean."""
        return max(abs(a - b) / mean(t) * 100 for t in self.turns.values() for a, b in pairwise(t))

    def line(self) -> str:
        """For people; a gain inside the A/A spread is none."""
        first, second = self.turns
        told = f"{self.gain_pct:+.2f} %" if abs(self.gain_pct) > self.spread_pct else "no difference"
        return (
            f"paths batch {self.batch:4d}: {first} {self.mean_us(first) / 1e3:.3f}, {second} "
            f"{self.mean_us(second) / 1e3:.3f} ms a step: {told}, A/A {self.spread_pct:.2f} %, "
            f"{len(self.turns[first])} turns each"
        )

    def rows(self) -> Iterator[dict[str, Any]]:
        """One result row an arm."""
        for arm, turns in self.turns.items():
            yield {
                "bench": "step_paths",
                "case": {"batch": self.batch, "context": self.tokens_in, "dtype": self.dtype, "block": BLOCK},
                "path": arm,
                "us": [round(us, 2) for us in turns],
                "us_median": round(median(turns), 2),
                "us_mean": round(self.mean_us(arm), 2),
                "gain_pct": round(self.gain_pct, 3),
                "aa_spread_pct": round(self.spread_pct, 3),
                "neighbours_apart_pct": round(self.largest_apart_pct, 3),
                "ran": self.ran[arm],
            }


class StepPaths:
    """Two arms over one model, each with graphs of its own on a GPU.

    Raises:
        ValueError: not two different arms, or one that this model cannot take.
    """

    def __init__(self, llm: LLM, names: Sequence[str]) -> None:
        if len(names) != 2:
            raise ValueError(f"paths {','.join(names)}: need two arms, A,B")
        self.llm, self.paths, self._own = llm, ModelPaths([llm.model]), llm.engine.runner.graphs
        self.arms = parse_arms(names, llm.model.config, llm.model.plan)
        self.graphs: dict[str, DecodeGraphs | None] = {}
        self.ran: dict[str, dict[str, int]] = {arm.name: {} for arm in self.arms}
        for arm in self.arms:
            self.graphs[arm.name] = self._capture(arm)

    def _capture(self, arm: PathArm) -> DecodeGraphs | None:
        """Graphs of this arm at the engine's sizes; what a capture counts is what every replay runs."""
        runner = self.llm.engine.runner
        if runner.graphs is None:
            return None
        graphs = DecodeGraphs(
            self.llm.model, runner.cache, runner.device, runner.graphs.sizes, self.llm.max_len, runner.vocab
        )
        self.paths.use(arm)
        try:
            with counters.counting() as ran:
                graphs.capture()
        finally:
            self.paths.restore()
        self.ran[arm.name] = _of_prologues(ran)
        return graphs

    def bench(
        self, batch: int, *, tokens_in: int = 1024, tokens_out: int = 128, repeats: int = 2, rng: random.Random
    ) -> PathTimes:
        """`repeats` waves; in each the arms take turns, and the wave that follows begins with the other one.

        Raises:
            ValueError: answers too short for four turns.
        """
        check_lengths(tokens_out, repeats)
        if tokens_out < 4 * BLOCK + 8:
            raise ValueError(f"tokens-out={tokens_out}: need at least {4 * BLOCK + 8} for arms to take turns A B B A")
        turns: dict[str, list[float]] = {arm.name: [] for arm in self.arms}
        with counters.counting() as ran:
            for wave in range(repeats):
                order = (0, 1, 1, 0) if wave % 2 == 0 else (1, 0, 0, 1)
                self._wave(batch, tokens_in, tokens_out, [self.arms[i] for i in order], turns, rng)
        if not all(turns.values()):
            raise ValueError(f"tokens-out={tokens_out}: too few for {batch} requests to decode together in four turns")
        if self._own is None:  # eager steps count themselves, prompts included
            self.ran = dict.fromkeys(self.ran, _of_prologues(ran))
        dtype = str(self.llm.model.dtype).removeprefix("torch.")
        return PathTimes(batch=batch, tokens_in=tokens_in, dtype=dtype, turns=turns, ran=self.ran)

    def _wave(
        self,
        batch: int,
        tokens_in: int,
        tokens_out: int,
        order: Sequence[PathArm],
        turns: dict[str, list[float]],
        rng: random.Random,
    ) -> None:
        engine = self.llm.engine
        timer = WaveTimer(self.llm, add_requests(self.llm, batch, tokens_in, tokens_out, rng), tokens_out)

        def before(interval: int) -> None:
            # what is launched now is the next interval's work where the engine runs ahead
            self._use(order[(interval + engine.ahead) // BLOCK % len(order)])

        try:
            seconds = timer.run(before).seconds
        finally:
            timer.end()
            engine.runner.graphs = self._own
            self.paths.restore()
        whole = len(seconds) // (BLOCK * len(order)) * len(order)
        for turn in range(whole):
            counted = seconds[turn * BLOCK + SKIPPED : (turn + 1) * BLOCK]
            turns[order[turn % len(order)].name].append(mean(counted) * 1e6)

    def _use(self, arm: PathArm) -> None:
        if self._own is None:
            self.paths.use(arm)
        else:
            self.llm.engine.runner.graphs = self.graphs[arm.name]


def _of_prologues(ran: dict[str, int]) -> dict[str, int]:
    """Counts of the paths alone."""
    return {n: count for n, count in ran.items() if n.startswith(("kda.", "mla.")) and not n.endswith(".gemm")}
