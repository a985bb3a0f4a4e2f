"""Turns logits into tokens: greedy, or temperature with top-k, top-p and min-p, reproducible by seed."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from anabranch.engine.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token, its log probability under the raw logits, and the top alternatives if they were asked for."""

    token: int
    logprob: float
    top: dict[int, float] = field(default_factory=dict)


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    generators: Sequence[torch.Generator],
    banned: Sequence[Sequence[int]],
) -> list[Sampled]:
    """One token for each row of `logits` [W, vocab] fp32; `banned[i]` are ids that row i may not choose now.

    Raises:
        FloatingPointError: a row holds a non-finite logit.
    """
    finite = logits.isfinite().all(-1)
    if not finite.all():
        raise FloatingPointError(f"non-finite logits in row {int((~finite).nonzero()[0])} of {len(params)}")
    logprobs = torch.log_softmax(logits, -1)
    allowed = logits
    if any(banned):
        allowed = logits.clone()
        for row, ids in enumerate(banned):
            allowed[row, list(ids)] = -torch.inf
    tokens = allowed.argmax(-1)
    for row, p in enumerate(params):
        if p.temperature > 0:
            tokens[row] = _draw(allowed[row] / p.temperature, p, generators[row])
    chosen = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    return [
        Sampled(token, chosen[row], _top(logprobs[row], params[row].logprobs))
        for row, token in enumerate(tokens.tolist())
    ]


def _top(logprobs: torch.Tensor, count: int | None) -> dict[int, float]:
    if not count:
        return {}
    values, ids = logprobs.topk(count)
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


def _draw(logits: torch.Tensor, p: SamplingParams, generator: torch.Generator) -> torch.Tensor:
    """One sample from softmax(logits) cut by top-k, then top-p, then min-p."""
    values, ids = logits.sort(descending=True, stable=True)
    if p.top_k > 0:
        values = values[: p.top_k]
    probs = torch.softmax(values, -1)
    # the first token is always kept: what precedes it sums to zero
    keep = probs.cumsum(-1) - probs < p.top_p
    keep &= probs >= p.min_p * probs[0]
    # drawn on the CPU, so that a seed means the same tokens on every device
    weights = (probs * keep).cpu()
    return ids[torch.multinomial(weights, 1, generator=generator).to(ids.device)][0]
