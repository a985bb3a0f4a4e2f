"""Runs the model over scheduled segments and samples for those that are ready for a token."""

from collections.abc import Sequence

import torch

from anabranch.engine.cache import PAGE, Cache
from anabranch.engine.request import Request
from anabranch.engine.sampler import Sampled, sample
from anabranch.layers.batch import Batch
from anabranch.models.kimi import KimiForCausalLM
from anabranch.ops.segments import Segments


class Runner:
    """The model, its cache and the device they live on."""

    def __init__(self, model: KimiForCausalLM, cache: Cache, device: torch.device | str) -> None:
        self.model, self.cache, self.device = model, cache, device

    @torch.inference_mode()
    def step(self, segments: Sequence[tuple[Request, int]], banned: Sequence[Sequence[int]]) -> list[Sampled | None]:
        """Compute `count` tokens of each (request, count); decoding requests must come first.

        Returns a sample for each request whose known tokens are then all computed, else None.
        """
        batch = self._batch(segments)
        logits = self.model(batch, self.cache.layers)
        ready = [(r, banned[i]) for i, (r, count) in enumerate(segments) if count == r.remaining]
        params, generators = [r.params for r, _ in ready], [r.generator for r, _ in ready]
        samples = iter(sample(logits, params, generators, [ids for _, ids in ready]) if ready else ())
        results = [next(samples) if count == r.remaining else None for r, count in segments]
        for request, count in segments:
            request.computed += count
        return results

    def _batch(self, segments: Sequence[tuple[Request, int]]) -> Batch:
        tokens, rows, wanted = [], [], []
        for request, count in segments:
            tokens += request.next_tokens(count)
            where = range(request.computed, request.computed + count)
            rows += [request.pages[p // PAGE] * PAGE + p % PAGE for p in where]
            if count == request.remaining:
                wanted.append(len(tokens) - 1)
        widest = max(len(r.pages) for r, _ in segments)
        table = [r.pages + [0] * (widest - len(r.pages)) for r, _ in segments]
        decodes = sum(r.decoding for r, _ in segments)
        lengths, totals = [count for _, count in segments], [r.computed + count for r, count in segments]
        return Batch(
            tokens=self._tensor(tokens),
            segments=Segments.of(lengths, totals, self.device),
            prefill=Segments.of(lengths[decodes:], totals[decodes:], self.device),
            decodes=decodes,
            slots=self._tensor([r.slot for r, _ in segments]),
            block_table=self._tensor(table),
            rows=self._tensor(rows),
            wanted=self._tensor(wanted),
        )

    def _tensor(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
