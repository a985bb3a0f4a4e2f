"""A request on its way through the engine, and what it becomes."""

import time
from dataclasses import dataclass, field

import torch

from anabranch.engine.sampler import Sampled
from anabranch.engine.sampling import SamplingParams
from anabranch.engine.text import TextStream


@dataclass(slots=True)
class Request:
    """Prompt, parameters and progress. `computed` counts tokens whose keys and state are in the cache."""

    id: int
    prompt: list[int]
    params: SamplingParams
    text: TextStream
    generator: torch.Generator = field(default_factory=torch.Generator)
    sampled: list[Sampled] = field(default_factory=list)
    computed: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    arrived: float = field(default_factory=time.perf_counter)
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
    def remaining(self) -> int:
        """Tokens not computed yet: the rest of the prompt, or the one newest sample."""
        return len(self.prompt) + len(self.sampled) - self.computed

    @property
    def decoding(self) -> bool:
        """Whether the whole prompt has been computed."""
        return self.computed >= len(self.prompt)

    @property
    def limit(self) -> int:
        """Tokens that this request may ever hold in the cache."""
        return len(self.prompt) + self.params.max_tokens

    def next_tokens(self, count: int) -> list[int]:
        """The next `count` tokens to compute."""
        if self.decoding:
            return [self.sampled[-1].token]
        return self.prompt[self.computed : self.computed + count]
