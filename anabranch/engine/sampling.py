"""How a request's tokens are chosen."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Names and defaults as in vLLM: temperature 0 is greedy, top_k 0 or -1 keeps all, logprobs None reports none.

    `n` answers to one prompt are drawn independently; with a seed, answer i uses seed + i.

    `logit_bias` maps token ids to what is added to their logits. `prompt_logprobs` asks for log probabilities of the
    prompt's own tokens; only then may `max_tokens` be 0.

    Raises:
        ValueError: a value is out of range; the message names it and what is accepted.
    """

    n: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        least = 1 if self.prompt_logprobs is None else 0
        checks = (
            ("n", 1 <= self.n <= 128, "1..128"),
            ("max_tokens", self.max_tokens >= least, f"at least {least}"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 (greedy) or a positive number"),
            ("top_p", 0 < self.top_p <= 1, "0 < top_p <= 1"),
            ("top_k", self.top_k >= -1, "0 or -1 (all), or a positive number"),
            ("min_p", 0 <= self.min_p <= 1, "0 <= min_p <= 1"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "-2..2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "-2..2"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "0.01..100"),
            ("logit_bias", all(abs(b) <= 100 for b in self.logit_bias.values()), "numbers in -100..100"),
            ("stop", all(self.stop), "non-empty strings"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "0 <= min_tokens <= max_tokens"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "None or 0..20"),
            ("prompt_logprobs", self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20, "None or 0..20"),
        )
        for name, ok, accepted in checks:
            if not ok:
                raise ValueError(f"{name}={getattr(self, name)!r}: need {accepted}")

    @property
    def reshapes_logits(self) -> bool:
        """Whether logits depend on the tokens so far or on a bias."""
        neutral = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) == (0.0, 0.0, 1.0)
        return not neutral or bool(self.logit_bias)
