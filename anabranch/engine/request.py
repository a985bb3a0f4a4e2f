"""A request on its way through the engine, and what it becomes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from anabranch.engine.prefix import Node, Saved
from anabranch.engine.sampler import Sampled
from anabranch.engine.sampling import SamplingParams
from anabranch.engine.text import TextStream

TokenLogprob = tuple[float | None, dict[int, float]]


@dataclass(slots=True, eq=False)
class Request:
    """Prompt, parameters and progress. `computed` counts tokens whose latent rows and state are in the cache.

    `prefill_until`: tokens that are computed as prompt; more than the prompt after a preemption. `node`: where the
    request hangs on the prefix tree, which owns its first pages. `saving`: (depth, snapshot slot) of the state that the
    step about to be launched leaves on its way; `saved`: states of launched steps that have not landed.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    text: TextStream
    eos_ids: frozenset[int] = frozenset()
    generator: torch.Generator = field(default_factory=torch.Generator)
    sampled: list[Sampled] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    computed: int = 0
    prefill_until: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    node: Node | None = None
    flying: int = 0
    saving: tuple[int, int] | None = None
    saved: list[Saved] = field(default_factory=list)
    cached_tokens: int = 0
    preemptions: int = 0
    finish_reason: str | None = None
    error: str | None = None
    arrived: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None

    def __post_init__(self) -> None:
        if self.params.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(self.params.seed)

    @property
    def output(self) -> list[int]:
        return [s.token for s in self.sampled]

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer so far."""
        return self.prompt + self.output

    @property
    def known(self) -> int:
        """Tokens of prompt and answer, those in flight included."""
        return len(self.prompt) + len(self.sampled) + self.flying

    @property
    def ending(self) -> bool:
        """Whether the sample in flight is the last one whatever it says."""
        return self.flying > 0 and len(self.sampled) + self.flying >= self.params.max_tokens

    @property
    def decoding(self) -> bool:
        """Whether only the newest sample is left to compute."""
        return self.slot >= 0 and self.computed >= self.prefill_until

    @property
    def banned(self) -> Sequence[int]:
        """Ids that may not be chosen now: the end tokens until `min_tokens` is reached."""
        if len(self.sampled) >= self.params.min_tokens:
            return ()
        return (*self.eos_ids, *self.params.stop_token_ids)

    def next_tokens(self, count: int) -> list[int]:
        """The next `count` tokens to compute; 0 stands for one that only the device knows."""
        if self.decoding and self.flying:
            return [0]
        if self.decoding:
            return [self.sampled[-1].token]
        return self.tokens[self.computed : self.computed + count]
