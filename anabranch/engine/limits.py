"""What an engine can ever take: whoever asks refuses the rest, without troubling the engine."""

from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.engine.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Token ids lie below `vocab`; a prompt plus its answer has at most `context` tokens, and fits into `cache`."""

    vocab: int
    context: int
    cache: int

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """ValueError as in both of the other checks."""
        self.check_ids(prompt, params)
        self.check_length(len(prompt), params)

    def check_ids(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """ValueError: a token id outside the vocabulary, in the prompt or in the parameters."""
        if wrong := [t for t in (*prompt, *params.logit_bias, *params.stop_token_ids) if not 0 <= t < self.vocab]:
            raise ValueError(f"token id {wrong[0]} is outside the vocabulary 0..{self.vocab - 1}")

    def check_length(self, count: int, params: SamplingParams) -> None:
        """ValueError: a prompt of `count` tokens is empty, or can never fit together with its answer."""
        asked = f"prompt of {count} tokens plus max_tokens={params.max_tokens}"
        if not count:
            raise ValueError("the prompt has no tokens; need at least 1")
        if count + params.max_tokens > self.context:
            raise ValueError(f"{asked} exceeds the context of {self.context}")
        if count + params.max_tokens > self.cache:
            raise ValueError(f"{asked} exceeds the {self.cache} tokens of the cache")
