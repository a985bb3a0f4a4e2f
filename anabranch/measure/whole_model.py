"""A whole model in process, with honest dummy weights: random prompts in, steps and their times out.

Every tensor has a random stream of its own and prompts are random tokens: with one seed for all of them, or one token
for all rows, a batch would touch fewer experts than a real one.
"""

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from anabranch.config.fusion import FusionConfig
from anabranch.engine.llm import LLM
from anabranch.engine.request import Request
from anabranch.engine.sampling import SamplingParams

SETTLED = 2  # intervals of a wave that are left out
MAX_LEN = 36864  # room that cache and graphs are made for where nothing longer is asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """What the model is built with; `LLM` explains it. `sizes`: decode batches that get a CUDA graph."""

    config: Path
    max_len: int
    sizes: Sequence[int]
    device: str = "auto"
    dtype: str = "auto"
    state_dtype: str = "float32"
    prefill_chunk: int = 16384
    memory_fraction: float = 0.94
    eager: bool = False
    deterministic: bool = False
    fusion: FusionConfig = field(default_factory=FusionConfig)
    ops: Mapping[str, str] = field(default_factory=dict)

    def open(self) -> LLM:
        """One model a process. ValueError as in `LLM`."""
        llm = LLM(
            self.config,
            load_format="dummy",
            max_seqs=max([*self.sizes, 1]),
            max_len=self.max_len,
            graph_sizes=self.sizes or None,
            prefix_cache=False,
            device=self.device,
            dtype=self.dtype,
            state_dtype=self.state_dtype,
            prefill_chunk=self.prefill_chunk,
            memory_fraction=self.memory_fraction,
            eager=self.eager,
            deterministic=self.deterministic,
            fusion=self.fusion,
            ops=self.ops,
        )
        # as in a server's engine process: a collection that visits the loaded model takes 0.2 s of a wave
        gc.collect()
        gc.freeze()
        return llm

    def arm(self, llm: LLM) -> str:
        """How rows name these options."""
        mode = "deterministic" if self.deterministic else "graphs" if llm.engine.runner.graphs else "eager"
        fusion = [self.fusion.kda, *([f"mla={self.fusion.mla}"] if self.fusion.mla != "auto" else [])]
        state = [] if self.state_dtype == "float32" else [f"state={self.state_dtype}"]
        return ", ".join([mode, *fusion, *state, *(f"{name}={how}" for name, how in self.ops.items())])


def add_requests(llm: LLM, batch: int, tokens_in: int, tokens_out: int, rng: random.Random) -> list[Request]:
    """Queue `batch` random prompts that are answered greedily to the full length."""
    vocab = llm.model.config.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=tokens_out, ignore_eos=True)
    requests = [llm.request([rng.randrange(vocab) for _ in range(tokens_in)], params) for _ in range(batch)]
    for request in requests:
        llm.engine.add(request)
    return requests


@dataclass(slots=True)
class Wave:
    """Requests that came together. `seconds`: from each step's tokens to the next one's while all of them decode.

    `settled_from`: the first interval that counts. `each`: seconds a token of every request, from its first token to
    its last: prompts of others are computed in between.
    """

    seconds: list[float] = field(default_factory=list)
    each: list[float] = field(default_factory=list)

    @property
    def tpot_ms(self) -> float:
        return mean(self.seconds) * 1e3

    @property
    def request_tpot_ms(self) -> float:
        """What a client calls time per output token."""
        return mean(self.each) * 1e3


class WaveTimer:
    """Drives the engine until every request of a wave has `tokens_out` tokens.

    A request may be asked for more, so that the batch is still whole afterwards (`steps`).
    """

    def __init__(self, llm: LLM, requests: Sequence[Request], tokens_out: int) -> None:
        self.llm, self.requests, self.tokens_out = llm, requests, tokens_out
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}

    def run(self, before: Callable[[int], None] | None = None) -> Wave:
        """`before(n)` is called ahead of the step that ends interval n of those that count, for each n in turn."""
        wave, last, skipped = Wave(), None, 0
        while any(len(r.sampled) < self.tokens_out for r in self.requests):
            if before is not None and last is not None and skipped == SETTLED:
                before(len(wave.seconds))
            told = self.llm.engine.step()
            now = time.perf_counter()
            self._note(told, now)
            steady = len(told) == len(self.requests) and all(len(r.sampled) > 1 for r in told)
            if steady and last is not None:
                if skipped < SETTLED:
                    skipped += 1
                else:
                    wave.seconds.append(now - last)
            last = now if steady else None
        wave.each = [(self._last[r.id] - self._first[r.id]) / (self.tokens_out - 1) for r in self.requests]
        return wave

    def _note(self, told: Sequence[Request], now: float) -> None:
        for request in told:
            if len(request.sampled) == 1:
                self._first[request.id] = now
            if len(request.sampled) == self.tokens_out:
                self._last[request.id] = now

    def steps(self, count: int) -> None:
        """More steps of the whole batch.

        AssertionError: a request has ended.
        """
        for _ in range(count):
            told = self.llm.engine.step()
            assert len(told) == len(self.requests), "the batch is no longer whole"

    def end(self) -> None:
        """Drop what is left of the requests."""
        for request in self.requests:
            self.llm.engine.abort(request)
