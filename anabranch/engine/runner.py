"""Runs the model over scheduled segments and samples for those that are ready for a token."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from anabranch.engine.cache import PAGE, Cache
from anabranch.engine.graphs import DecodeGraphs
from anabranch.engine.request import Request, TokenLogprob
from anabranch.engine.sampler import Sampled, sample, top_logprobs
from anabranch.fusion.plan import Moment
from anabranch.layers.batch import Batch
from anabranch.models.kimi import KimiForCausalLM
from anabranch.ops.segments import Segments


@dataclass(slots=True)
class Result:
    """What a step gave one request: a sample once all its known tokens are computed, and scores of prompt tokens."""

    sampled: Sampled | None = None
    finite: bool = True
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


class Runner:
    """The model, its cache and the device they live on.

    Args:
        vocab: ids below this may be sampled; a model's table may be padded beyond its tokenizer.
    """

    def __init__(self, model: KimiForCausalLM, cache: Cache, vocab: int | None = None) -> None:
        self.model, self.cache, self.device = model, cache, cache.device
        self.graphs: DecodeGraphs | None = None
        self.eager_steps: Counter[str] = Counter()
        self.graph_replays: Counter[int] = Counter()
        self.vocab = min(vocab or model.config.vocab_size, model.config.vocab_size)

    @torch.inference_mode()
    def step(self, segments: Sequence[tuple[Request, int]]) -> list[Result]:
        """Compute `count` tokens of each (request, count); decoding requests must come first."""
        if not segments:
            return []
        eager = self._why_eager(segments)
        if eager is None:
            assert self.graphs is not None
            logits, size = self.graphs.run([r for r, _ in segments])
            self.graph_replays[size] += 1
            owners = list(range(len(segments)))
        else:
            self.eager_steps[eager] += 1
            batch, owners = self._batch(segments)
            logits = self.model(batch, self.cache.layers)
        return self._results(segments, logits[:, : self.vocab], owners)

    def _why_eager(self, segments: Sequence[tuple[Request, int]]) -> str | None:
        """The reason that a step is not replayed from a graph, or None."""
        if self.graphs is None:
            return "no graphs"
        if not all(r.decoding for r, _ in segments):
            return "prefill in the batch"
        return None if self.graphs.fits(len(segments)) else "batch above the largest graph"

    def _results(
        self, segments: Sequence[tuple[Request, int]], logits: torch.Tensor, owners: list[int]
    ) -> list[Result]:
        """`owners[i]` is the segment of logits row i; the last row of a ready segment is sampled."""
        results = [Result() for _ in segments]
        last = {owner: row for row, owner in enumerate(owners)}
        ready = [i for i, (r, count) in enumerate(segments) if r.computed + count == r.known]
        rows = [last[i] for i in ready]
        picked = logits if rows == list(range(len(owners))) else logits[rows]
        samples = sample(picked, [segments[i][0] for i in ready], self.model.ops.log_softmax) if ready else []
        for i, sampled in zip(ready, samples, strict=True):
            results[i].sampled, results[i].finite = sampled, sampled is not None
        for i, (request, count) in enumerate(segments):
            if wants_prompt_logprobs(request):
                first = owners.index(i)
                results[i].prompt_logprobs = self._prompt_logprobs(request, count, logits[first : first + count])
        return results

    def _prompt_logprobs(self, request: Request, count: int, logits: torch.Tensor) -> list[TokenLogprob]:
        """Row i predicts the token behind it; the first prompt token has no log probability."""
        start: list[TokenLogprob] = [(None, {})] if request.computed == 0 else []
        following = request.prompt[request.computed + 1 : request.computed + count + 1]
        logprobs = self.model.ops.log_softmax(logits[: len(following)])
        top = request.params.prompt_logprobs
        return start + [
            (float(row[token]), top_logprobs(row, top)) for row, token in zip(logprobs, following, strict=True)
        ]

    def _batch(self, segments: Sequence[tuple[Request, int]]) -> tuple[Batch, list[int]]:
        tokens, rows, wanted, owners = [], [], [], []
        for i, (request, count) in enumerate(segments):
            first = len(tokens)
            tokens += request.next_tokens(count)
            where = range(request.computed, request.computed + count)
            rows += [request.pages[p // PAGE] * PAGE + p % PAGE for p in where]
            if wants_prompt_logprobs(request):
                wanted += range(first, first + count)
                owners += [i] * count
            elif request.computed + count == request.known:
                wanted.append(len(tokens) - 1)
                owners.append(i)
        widest = max(len(r.pages) for r, _ in segments)
        decodes = sum(r.decoding for r, _ in segments)
        lengths, totals = [count for _, count in segments], [r.computed + count for r, count in segments]
        batch = Batch(
            tokens=self._tensor(tokens),
            segments=Segments.of(lengths, totals, self.device),
            prefill=Segments.of(lengths[decodes:], totals[decodes:], self.device),
            decodes=decodes,
            slots=self._tensor([r.slot for r, _ in segments]),
            block_table=self._tensor([r.pages + [0] * (widest - len(r.pages)) for r, _ in segments]),
            rows=self._tensor(rows),
            wanted=self._tensor(wanted),
            moment=Moment(max(totals), max(totals), False),
        )
        return batch, owners

    def _tensor(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def wants_prompt_logprobs(request: Request) -> bool:
    """Whether this request's prompt is still being scored."""
    return request.params.prompt_logprobs is not None and not request.decoding and not request.sampled
