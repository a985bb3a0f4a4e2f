"""Turns logits into tokens: greedy, or temperature with top-k, top-p and min-p, reproducible by seed.

Everything runs where the logits are; the host draws one uniform number for each token that is left to chance. Nothing
here waits for the device before `Samples.read`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from anabranch.engine.sampling import SamplingParams
from anabranch.ops.registry import Ops
from anabranch.ops.staging import to_device, to_host


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


@dataclass(frozen=True, slots=True)
class Samples:
    """Tokens on their way: `tokens` int64 [W] where the logits are, the rest a host copy that is not complete yet.

    `tops`: for each row that asked for alternatives, (log probabilities, ids).
    """

    tokens: torch.Tensor
    chosen: torch.Tensor
    logprobs: torch.Tensor
    tops: dict[int, tuple[torch.Tensor, torch.Tensor]]

    def read(self) -> list[Sampled | None]:
        """One sample for each row, None where a logit was not finite; the copies must be complete."""
        logprobs = self.logprobs.tolist()
        return [
            Sampled(token, logprobs[row], self._top(row)) if logprobs[row] == logprobs[row] else None
            for row, token in enumerate(self.chosen.tolist())
        ]

    def _top(self, row: int) -> dict[int, float]:
        if row not in self.tops:
            return {}
        values, ids = self.tops[row]
        return dict(zip(ids.tolist(), values.tolist(), strict=True))


def needs_history(request: Drawer) -> bool:
    """Whether the next choice depends on the tokens before it other than through the logits."""
    return request.params.reshapes_logits or bool(request.banned)


def is_greedy(request: Drawer) -> bool:
    """Whether the choice is the largest logit as the model gives it, which every rank of a replica finds alike."""
    return request.params.temperature <= 0 and not needs_history(request)


def sample(
    logits: torch.Tensor,
    requests: Sequence[Drawer],
    ops: Ops,
    picked: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Samples:
    """One token for each row of `logits` [W, vocab], fp32 or the model dtype; penalties and biases are added in fp32.

    Args:
        picked: what `ops.pick(logits)` gives, if it was computed before; it is written to.
    """
    tokens, logprobs = picked or ops.pick(logits)
    allowed, moved = _reshaped(logits, requests)
    if moved:
        tokens[to_device(moved, logits.device)] = allowed[to_device(moved, logits.device)].argmax(-1)
    hot = [row for row, r in enumerate(requests) if r.params.temperature > 0]
    if hot:
        chance = [torch.rand((), generator=requests[row].generator, dtype=torch.float64).item() for row in hot]
        tokens[to_device(hot, logits.device)] = draw(allowed, hot, [requests[row].params for row in hot], chance)
    top = {row: r.params.logprobs for row, r in enumerate(requests) if r.params.logprobs}
    scored = sorted({*moved, *hot, *top})
    tops = {}
    if scored:
        at = to_device(scored, logits.device)
        scores = ops.log_softmax(logits[at])
        # the pick's NaN marks a row that is not finite
        logprobs[at] = torch.where(logprobs[at].isnan(), logprobs[at], scores.gather(1, tokens[at, None])[:, 0])
        for row, count in top.items():
            values, ids = scores[scored.index(row)].topk(count)
            tops[row] = to_host(values), to_host(ids)
    return Samples(tokens, to_host(tokens), to_host(logprobs), tops)


def top_logprobs(logprobs: torch.Tensor, count: int | None) -> dict[int, float]:
    """The `count` most probable ids of one row [vocab], best first."""
    if not count:
        return {}
    values, ids = logprobs.topk(count)
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


def draw(
    logits: torch.Tensor, rows: Sequence[int], params: Sequence[SamplingParams], chance: Sequence[float]
) -> torch.Tensor:
    """One token id for each of `rows` from softmax(logits / temperature) cut by top-k, then top-p, then min-p.

    Args:
        chance: a uniform number in [0, 1) for each row; the token is where the cumulative probability passes it.
    """
    device = logits.device
    tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
    # a row is sorted only if it is cut, and then whatever its neighbours ask for: its draw does not depend on them
    for cut in (False, True):
        mine = [i for i, p in enumerate(params) if _cuts(p) == cut]
        if mine:
            values = logits[to_device([rows[i] for i in mine], device)]
            u = to_device([chance[i] for i in mine], device, torch.float64)[:, None]
            drawn = (_draw_cut if cut else _draw_any)(values, [params[i] for i in mine], u)
            tokens[to_device(mine, device)] = drawn
    return tokens


def _cuts(p: SamplingParams) -> bool:
    return p.top_p < 1 or p.min_p > 0 or p.top_k > 0


def _column(params: Sequence[SamplingParams], name: str, device: torch.device) -> torch.Tensor:
    return to_device([getattr(p, name) for p in params], device, torch.float64)[:, None]


def _draw_any(logits: torch.Tensor, params: Sequence[SamplingParams], chance: torch.Tensor) -> torch.Tensor:
    # in double and from the largest down, so that no temperature underflows to a division by zero
    below = logits.double() - logits.amax(-1, keepdim=True).double()
    return _place(torch.softmax(below / _column(params, "temperature", logits.device), -1), chance)[:, 0]


def _draw_cut(logits: torch.Tensor, params: Sequence[SamplingParams], chance: torch.Tensor) -> torch.Tensor:
    values, ids = logits.sort(descending=True, stable=True)
    device, width = logits.device, logits.shape[1]
    kept = to_device([p.top_k if p.top_k > 0 else width for p in params], device)[:, None]
    scaled = (values.double() - values[:, :1].double()) / _column(params, "temperature", device)
    scaled = scaled.masked_fill(torch.arange(width, device=device) >= kept, -torch.inf)
    probs = torch.softmax(scaled, -1)
    keep = _running_sum(probs) - probs < _column(params, "top_p", device)
    keep &= probs >= _column(params, "min_p", device) * probs[:, :1]
    keep[:, 0] = True
    return ids.gather(1, _place(probs * keep, chance))[:, 0]


def _place(weights: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """The column [n, 1] at which the running sum of each row passes its share `chance` [n, 1] of the whole."""
    reached = _running_sum(weights)
    # below the whole whatever the rounding, so that the column passed has weight
    goal = torch.minimum(chance * reached[:, -1:], reached[:, -1:].nextafter(reached.new_zeros(())))
    # a row of NaN passes nothing
    return torch.searchsorted(reached, goal, right=True).clamp_max(weights.shape[1] - 1)


def _running_sum(probs: torch.Tensor) -> torch.Tensor:
    """Cumulative sums of rows [n, V]; a lone row takes the kernel that several take, so its bits are the same."""
    return torch.cumsum(probs, -1) if len(probs) > 1 else torch.cumsum(probs.expand(2, -1), -1)[:1]


def _reshaped(logits: torch.Tensor, requests: Sequence[Drawer]) -> tuple[torch.Tensor, list[int]]:
    """Logits after penalties, biases and bans, and the rows that these touched."""
    touched = [row for row, r in enumerate(requests) if r.params.reshapes_logits or r.banned]
    if not touched:
        return logits, touched
    logits = logits.to(torch.float32, copy=True)
    for row in touched:
        request, p = requests[row], requests[row].params
        if p.reshapes_logits:
            _penalise(logits[row], request)
        for token, bias in p.logit_bias.items():
            logits[row, token] += bias
        banned = list({*request.banned})
        if len(banned) < logits.shape[1]:  # one that bans everything bans nothing
            logits[row, banned] = -torch.inf
    return logits, touched


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
