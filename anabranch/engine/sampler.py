"""Turns logits into tokens: greedy, or temperature with top-k, top-p and min-p, reproducible by seed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from anabranch.engine.sampling import SamplingParams
from anabranch.ops.registry import Op


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token, its log probability under the raw logits, and the top alternatives if they were asked for."""

    token: int
    logprob: float
    top: dict[int, float] = field(default_factory=dict)


class Drawer(Protocol):
    """What sampling must know of a request: see `engine.request.Request`."""

    params: SamplingParams
    generator: torch.Generator
    prompt: list[int]

    @property
    def output(self) -> list[int]: ...

    @property
    def banned(self) -> Sequence[int]: ...


def sample(logits: torch.Tensor, requests: Sequence[Drawer], log_softmax: Op) -> list[Sampled | None]:
    """One token for each row of `logits` [W, vocab] fp32; None where a logit is not finite."""
    finite = logits.isfinite().all(-1).tolist()
    logprobs = log_softmax(logits)
    allowed = _reshaped(logits, requests)
    tokens = allowed.argmax(-1)
    for row, request in enumerate(requests):
        if request.params.temperature > 0 and finite[row]:
            tokens[row] = _draw(allowed[row], request.params, request.generator)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    return [
        Sampled(token, chosen[row], top_logprobs(logprobs[row], requests[row].params.logprobs)) if finite[row] else None
        for row, token in enumerate(tokens.tolist())
    ]


def top_logprobs(logprobs: torch.Tensor, count: int | None) -> dict[int, float]:
    """The `count` most probable ids of one row [vocab], best first."""
    if not count:
        return {}
    values, ids = logprobs.topk(count)
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


def _reshaped(logits: torch.Tensor, requests: Sequence[Drawer]) -> torch.Tensor:
    """Logits after penalties, biases and bans; rows that need none of them share the input's memory."""
    touched = [row for row, r in enumerate(requests) if r.params.reshapes_logits or r.banned]
    if not touched:
        return logits
    logits = logits.clone()
    for row in touched:
        request, p = requests[row], requests[row].params
        if p.reshapes_logits:
            _penalise(logits[row], request)
        for token, bias in p.logit_bias.items():
            logits[row, token] += bias
        banned = list({*request.banned})
        if len(banned) < logits.shape[1]:  # one that bans everything bans nothing
            logits[row, banned] = -torch.inf
    return logits


def _penalise(logits: torch.Tensor, request: Drawer) -> None:
    """Repetition (prompt and answer), then presence and frequency (answer), in place on one row."""
    p = request.params
    if p.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*request.prompt, *request.output}), device=logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if request.output and (p.presence_penalty or p.frequency_penalty):
        ids, counts = torch.tensor(request.output, device=logits.device).unique(return_counts=True)
        logits[ids] -= p.presence_penalty + p.frequency_penalty * counts


def _draw(logits: torch.Tensor, p: SamplingParams, generator: torch.Generator) -> torch.Tensor:
    """One sample from softmax(logits) cut by top-k, then top-p, then min-p."""
    values, ids = logits.sort(descending=True, stable=True)
    if p.top_k > 0:
        values = values[: p.top_k]
    # drawn on the CPU, so that a seed means the same tokens on every device
    # in double and from the largest down, so that no temperature or top_p underflows to a division by zero
    scaled = (values.cpu().double() - values[0].item()) / p.temperature
    probs = torch.softmax(scaled, -1)
    keep = probs.cumsum(-1) - probs < p.top_p
    keep &= probs >= p.min_p * probs[0]
    keep[0] = True
    return ids[torch.multinomial(probs * keep, 1, generator=generator).to(ids.device)][0]
