"""Runs the model over scheduled segments and samples for those that are ready for a token."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from anabranch.engine.cache import Cache, row_of, rows_of
from anabranch.engine.flight import Flight
from anabranch.engine.graphs import DecodeGraphs
from anabranch.engine.prompt_graphs import PromptGraphs
from anabranch.engine.request import Request, TokenLogprob
from anabranch.engine.sampler import is_greedy, sample, top_logprobs
from anabranch.fusion.plan import Moment
from anabranch.layers.batch import Batch, Saves
from anabranch.models.kimi import KimiForCausalLM
from anabranch.ops.segments import Segments
from anabranch.ops.staging import to_device, together


@dataclass(frozen=True, slots=True)
class Turn:
    """How the ranks of all attention replicas take one step.

    `counts`: rows of each replica. `size` or `prompt`: the decode or prompt graph that all replay, or neither with the
    reason `eager`. `follow`: the next step may begin before this one is read, so every rank keeps the tokens that were
    sampled.
    """

    counts: tuple[int, ...]
    size: int | None = None
    prompt: int | None = None
    eager: str = ""
    follow: bool = False


class Runner:
    """The model, its cache and the device they live on.

    Args:
        vocab: ids below this may be sampled; a model's table may be padded beyond its tokenizer.
        samples: whether this rank turns logits into tokens; otherwise its flights have no results, though they may
            have the tokens.
    """

    def __init__(self, model: KimiForCausalLM, cache: Cache, vocab: int | None = None, samples: bool = True) -> None:
        self.model, self.cache, self.device = model, cache, cache.device
        self.graphs: DecodeGraphs | None = None
        self.prompts: PromptGraphs | None = None
        self.samples = samples
        self.eager_steps: Counter[str] = Counter()
        self.graph_replays: Counter[int] = Counter()
        self.prompt_replays: Counter[int] = Counter()
        self.vocab = min(vocab or model.config.vocab_size, model.config.vocab_size)

    @property
    def saves(self) -> bool:
        """Whether prompts can leave states on their way."""
        return self.model.ops.prefill_saves

    def turn(self, replicas: Sequence[Sequence[tuple[Request, int]]], follow: bool = False) -> Turn:
        """How the ranks of several attention replicas take a step together; an idle one computes a row for nobody."""
        eager = next((why for s in replicas if s and (why := self._why_eager(s)) is not None), None)
        if eager is None:
            assert self.graphs is not None
            size = self.graphs.size(max(map(len, replicas)))
            return Turn((size,) * len(replicas), size=size, follow=follow)
        if self.prompts is not None and (prompt := self.prompts.size(replicas)) is not None:
            return Turn((prompt,) * len(replicas), prompt=prompt, follow=follow)
        return Turn(tuple(max(1, sum(n for _, n in s)) for s in replicas), eager=eager, follow=follow)

    @torch.inference_mode()
    def launch(
        self, segments: Sequence[tuple[Request, int]], behind: Flight | None = None, turn: Turn | None = None
    ) -> Flight:
        """Start to compute `count` tokens of each (request, count); decoding requests must come first.

        Args:
            behind: the step in flight, whose samples the decoding requests continue from.
            turn: how all ranks of the job take this step; then the model runs also without a segment. None: one rank
                is the job.
        """
        newest = self._newest(segments, behind)
        turn, picked = turn or self.turn([segments]), None
        if turn.size is not None:
            assert self.graphs is not None
            logits, picked = self.graphs.run([r for r, _ in segments], newest, turn.size)
            self.graph_replays[turn.size] += 1
            owners = list(range(len(segments)))
        elif turn.prompt is not None:
            assert self.prompts is not None
            logits, picked = self.prompts.run(*(segments[0] if segments else (None, 0)), turn.prompt)
            self.prompt_replays[turn.prompt] += 1
            owners = [0] if segments else []
        else:
            self.eager_steps[turn.eager] += 1
            batch, owners = self._batch(segments, newest) if segments else (self._idle(), [])
            logits = self.model(replace(batch, counts=turn.counts), self.cache.layers)
        if not self.samples and not turn.follow:
            return Flight(list(segments), [], None, {})
        return self._sampled(list(segments), logits[:, : self.vocab], owners, picked, turn.follow)

    def _newest(self, segments: Sequence[tuple[Request, int]], behind: Flight | None) -> torch.Tensor | None:
        """int64 [decoding requests]: their newest tokens, if these are known on the device only."""
        flying = [r for r, _ in segments if r.decoding and r.flying]
        if not flying:
            return None
        assert behind is not None
        assert behind.tokens is not None
        places, tokens = behind.rows(), behind.tokens
        rows = [places[r] for r in flying]
        return tokens if rows == list(range(len(tokens))) else tokens[to_device(rows, self.device)]

    def _why_eager(self, segments: Sequence[tuple[Request, int]]) -> str | None:
        """The reason that a step is not replayed from a graph, or None."""
        if self.graphs is None:
            return "no graphs"
        if not all(r.decoding for r, _ in segments):
            return "prefill in the batch"
        return None if self.graphs.fits(len(segments)) else "batch above the largest graph"

    def _sampled(
        self,
        segments: list[tuple[Request, int]],
        logits: torch.Tensor,
        owners: list[int],
        picked: tuple[torch.Tensor, torch.Tensor] | None,
        follow: bool,
    ) -> Flight:
        """`owners[i]` is the segment of logits row i; the last row of a ready segment is sampled."""
        scored: dict[int, list[TokenLogprob]] = {}
        for i, (request, count) in enumerate(segments):
            if self.samples and wants_prompt_logprobs(request):
                first = owners.index(i)
                scored[i] = self._prompt_logprobs(request, count, logits[first : first + count])
        last = {owner: row for row, owner in enumerate(owners)}
        ready = [i for i, (r, count) in enumerate(segments) if r.computed + count == r.known]
        samples = tokens = None
        if ready:
            rows, requests = [last[i] for i in ready], [segments[i][0] for i in ready]
            chosen = logits if rows == list(range(len(owners))) else logits[to_device(rows, self.device)]
            samples = sample(chosen, requests, self.model.ops, picked) if self.samples else None
            tokens = samples.tokens if samples else (picked or self.model.ops.pick(chosen))[0]
            if follow and not all(map(is_greedy, requests)):
                # the ranks of a replica have the same logits, but only one draws
                tokens = self.model.model.comm.broadcast(tokens, "attn_tp")
        for i in ready:
            segments[i][0].flying += 1
        return Flight(segments, ready, samples, scored, tokens)

    def _prompt_logprobs(self, request: Request, count: int, logits: torch.Tensor) -> list[TokenLogprob]:
        """Row i predicts the token behind it; the first prompt token has no log probability."""
        start: list[TokenLogprob] = [(None, {})] if request.computed == 0 else []
        following = request.prompt[request.computed + 1 : request.computed + count + 1]
        logprobs = self.model.ops.log_softmax(logits[: len(following)])
        top = request.params.prompt_logprobs
        return start + [
            (float(row[token]), top_logprobs(row, top)) for row, token in zip(logprobs, following, strict=True)
        ]

    def _batch(
        self, segments: Sequence[tuple[Request, int]], newest: torch.Tensor | None = None
    ) -> tuple[Batch, list[int]]:
        decodes = sum(r.decoding for r, _ in segments)
        lengths, totals = [count for _, count in segments], [r.computed + count for r, count in segments]
        offsets = np.cumsum([0, *lengths])
        tokens, rows, table, wanted, owners = _packed(segments, decodes, offsets.tolist())
        placed = together(
            self.device,
            tokens=tokens,
            rows=rows,
            block_table=table,
            wanted=wanted,
            slots=[r.slot for r, _ in segments],
            offsets=offsets,
            ends=totals,
            prompt_offsets=offsets[decodes:] - offsets[decodes],
            prompt_ends=totals[decodes:],
        )
        if newest is not None:
            placed["tokens"][:decodes] = newest
        prompts = tuple(lengths[decodes:]), tuple(totals[decodes:])
        batch = Batch(
            tokens=placed["tokens"],
            segments=Segments(tuple(lengths), tuple(totals), placed["offsets"], placed["ends"]),
            prefill=Segments(*prompts, placed["prompt_offsets"], placed["prompt_ends"]),
            decodes=decodes,
            slots=placed["slots"],
            block_table=placed["block_table"],
            rows=placed["rows"],
            wanted=placed["wanted"],
            moment=Moment(max(totals), max(totals), False),
            saves=self._saves(segments[decodes:]),
        )
        return batch, owners

    def _saves(self, prompts: Sequence[tuple[Request, int]]) -> Saves | None:
        marks = [r.saving and (r.saving[0] - r.computed, r.saving[1]) for r, _ in prompts]
        return Saves.of([count for _, count in prompts], marks, self.device)

    def _idle(self) -> Batch:
        """One token of no request: every rank takes part in what its peers compute."""
        none = self._tensor([-1])
        return Batch(
            tokens=self._tensor([0]),
            segments=Segments.of([1], [0], self.device),
            prefill=Segments.of([], [], self.device),
            decodes=1,
            slots=none,
            block_table=self._tensor([[0]]),
            rows=none,
            wanted=self._tensor([0]),
            moment=Moment(1, 1, False),
        )

    def _tensor(self, values: list) -> torch.Tensor:
        return to_device(values, self.device)


def _packed(
    segments: Sequence[tuple[Request, int]], decodes: int, offsets: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int], list[int]]:
    """Tokens and their cache rows, int64 [T], block table, int64 [B, pages], tokens whose logits are wanted, and the
    segment that each of these belongs to."""
    tokens, rows = np.empty((2, offsets[-1]), dtype=np.int64)
    table = np.zeros((len(segments), max(len(r.pages) for r, _ in segments)), dtype=np.int64)
    tokens[:decodes] = [r.next_tokens(1)[0] for r, _ in segments[:decodes]]
    rows[:decodes] = [row_of(r.pages, r.computed) for r, _ in segments[:decodes]]
    wanted: list[int] = []
    owners: list[int] = []
    for i, (request, count) in enumerate(segments):
        first, stop = offsets[i : i + 2]
        if i >= decodes:
            tokens[first:stop] = request.next_tokens(count)
            rows[first:stop] = rows_of(request.pages, request.computed, count)
        table[i, : len(request.pages)] = request.pages
        scored = count if wants_prompt_logprobs(request) else int(request.computed + count == request.known)
        wanted += range(stop - scored, stop)
        owners += [i] * scored
    return tokens, rows, table, wanted, owners


def wants_prompt_logprobs(request: Request) -> bool:
    """Whether this request's prompt is still being scored."""
    return request.params.prompt_logprobs is not None and not request.decoding and not request.sampled
