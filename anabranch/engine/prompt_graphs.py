"""CUDA graphs of short prompts from their first token: one request a replay, padded to a ladder of sizes.

A replay must not ask the host for a length, nor where a state is saved on the way. The recurrent layers read where the
prompt ends on the device, and take the padding for a second segment without a slot, whose outputs are zeros. Attention
sees one causal square of the padded size: no token looks at what stands behind it. Padding repeats the prompt's tokens,
so that it meets no expert of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from anabranch.engine.cache import PAGE, Cache
from anabranch.engine.graphs import capture_mode, record
from anabranch.engine.request import Request
from anabranch.fusion.plan import Moment
from anabranch.layers.batch import Batch, Saves
from anabranch.models.kimi import KimiForCausalLM
from anabranch.ops.segments import Segments

SIZES = (64, 128, 192, 256, 384, 512, 768, 1024)  # tokens, in pages; above, a step's work hides the host
_UNIT = 16  # numbers: every field starts on 128 bytes, so that kernels meet one alignment


def why_not(model: KimiForCausalLM) -> str | None:
    """The reason that a model's prompts cannot be captured, or None."""
    place, chosen = model.parallel, {name: choice[0] for name, choice in model.selection.chosen.items()}
    if place.dp_size * place.pp_size > 1:
        return "several attention replicas or stages"
    if chosen["kda_prefill"] not in ("cuda", "chunked"):
        return f"kda_prefill={chosen['kda_prefill']} asks the host for lengths"
    return None if chosen["mla_prefill"] == "cudnn" else f"mla_prefill={chosen['mla_prefill']} is not captured"


@dataclass(frozen=True, slots=True)
class _Captured:
    """One graph and the tensors that it reads and writes at every replay, which must outlive it."""

    graph: torch.cuda.CUDAGraph
    fields: torch.Tensor
    batch: Batch
    logits: torch.Tensor
    picked: tuple[torch.Tensor, torch.Tensor]


class PromptGraphs:
    """One graph for each size, captured largest first so that they share memory.

    Args:
        sizes: tokens; multiples of a page. A shorter prompt is padded to the next one.
        vocab: ids below this may be chosen; None is all that the model has logits for.

    Raises:
        ValueError: a size that is not a positive multiple of a page.
    """

    def __init__(
        self, model: KimiForCausalLM, cache: Cache, sizes: Sequence[int] = SIZES, vocab: int | None = None
    ) -> None:
        if not sizes or any(size < PAGE or size % PAGE for size in sizes):
            raise ValueError(f"prompt graph sizes {list(sizes)}: need at least one, all positive multiples of {PAGE}")
        self.model, self.cache, self.device, self.vocab = model, cache, cache.device, vocab
        self.sizes = sorted(set(sizes))
        self.saves = cache.snapshots > 0 and model.ops.prefill_saves
        self._graphs: dict[int, _Captured] = {}

    def size(self, segments: Sequence[tuple[Request, int]]) -> int | None:
        """The graph that holds a step of one prompt, or of its beginning; None if none does."""
        if len(segments) != 1:
            return None
        request, count = segments[0]
        plain = not request.decoding and request.computed == 0 and request.params.prompt_logprobs is None
        return next((size for size in self.sizes if size >= count), None) if plain else None

    @torch.inference_mode()
    def capture(self) -> None:
        """Record every size. The cache is not written: there is no slot and no row meanwhile."""
        pool, stream, mode = None, torch.cuda.Stream(self.device), capture_mode(self.model)
        for size in reversed(self.sizes):
            fields = self.host(size).to(self.device)
            batch = self.batch(fields, size)
            graph, (logits, picked) = record(lambda batch=batch: self._forward(batch), stream, pool, mode)
            pool = pool or graph.pool()
            self._graphs[size] = _Captured(graph, fields, batch, logits, picked)

    def run(self, request: Request, count: int, size: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """The first `count` tokens of a request, at most `size`: logits [1, vocab] of the last, `ops.pick` of them.

        The tensors are valid until the next run.
        """
        captured = self._graphs[size]
        captured.fields.copy_(self.host(size, request, count), non_blocking=True)
        captured.graph.replay()
        return captured.logits, captured.picked

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        logits = self.model(batch, self.cache.layers)
        return logits, self.model.ops.pick(logits[:, : self.vocab])

    def host(self, size: int, request: Request | None = None, count: int = 0) -> torch.Tensor:
        """int64: the fields of a prompt; without one, of a full size of tokens of nobody."""
        buffer = torch.zeros(sum(_places(size)), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        tokens, rows, table, chunks, *rest = (part.numpy() for part in _split(buffer, size))
        offsets, ends, slots, wanted, kept, cuts = rest
        count = size if request is None else count
        offsets[:3], ends[0], wanted[0] = (0, count, size), count, count - 1
        slots[:2], rows[:], table[:], chunks[:], kept[0] = -1, -1, self.cache.pages, -1, -1
        if request is None:
            tokens[:] = np.arange(size) % self.model.config.vocab_size
        else:
            pages = np.asarray(request.pages[: -(-count // PAGE)])
            slots[0], tokens[:] = request.slot, np.resize(request.next_tokens(count), size)
            rows[:count] = (pages[:, None] * PAGE + np.arange(PAGE)).ravel()[:count]
            # what padding reads must be finite wherever the request is: pages of its own
            table[:], table[: len(pages)] = pages[0], pages
            if request.saving is not None:
                cuts[0], kept[0] = request.saving
                chunks[cuts[0] // PAGE - 1] = kept[0]
        return buffer

    def batch(self, fields: torch.Tensor, size: int) -> Batch:
        """The pass over a padded prompt; host lengths say how much room its segments may take, wherever they end."""
        tokens, rows, table, chunks, *rest = _split(fields, size)
        offsets, ends, slots, wanted, kept, cuts = rest
        whole = torch.tensor([0, size], device=self.device)
        return Batch(
            tokens=tokens,
            segments=Segments((size - 1, 1), (size - 1, 0), offsets[:3], ends[:2]),
            prefill=Segments((size,), (size,), whole, whole[1:]),
            decodes=0,
            slots=slots[:2],
            block_table=table[None],
            rows=rows,
            wanted=wanted[:1],
            moment=Moment(size, size, True),
            saves=Saves(chunks=chunks, slots=kept[:1], ends=cuts[:1]) if self.saves else None,
        )


def _places(size: int) -> list[int]:
    """Numbers that each field takes; the short ones take a unit."""
    table, chunks = (-(-places // _UNIT) * _UNIT for places in (size // PAGE, _chunks(size)))
    return [size, size, table, chunks, *(_UNIT for _ in ("offsets", "ends", "slots", "wanted", "kept", "cuts"))]


def _chunks(size: int) -> int:
    """Chunks of the longest prompt that leaves a token of padding, and of that."""
    return size // PAGE + 1


def _split(fields: torch.Tensor, size: int) -> list[torch.Tensor]:
    tokens, rows, table, chunks, *rest = fields.split(_places(size))
    return [tokens, rows, table[: size // PAGE], chunks[: _chunks(size)], *rest]
