"""CUDA graphs of short prompts and of what is left of longer ones: one request a replay, padded to a ladder of sizes.

A replay must not ask the host for a length, nor where a state is saved on the way. The recurrent layers read on the
device what a prompt goes on from and where it ends, and take the padding for a second segment without a slot, whose
outputs are zeros. Attention has two forms. Up to SINGLE tokens each is a decode token of its own over the cache: so
they may stand behind a history, be it a cached prefix or earlier chunks. A larger size is one causal square from the
first token on: no token looks at what stands behind it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from anabranch.engine.cache import PAGE, Cache, pages_for, rows_of
from anabranch.engine.graphs import capture_mode, pick, record
from anabranch.engine.request import Request
from anabranch.fusion.plan import Moment
from anabranch.layers.batch import Batch, Saves
from anabranch.models.kimi import KimiForCausalLM
from anabranch.ops.segments import Segments
from anabranch.ops.staging import spans

SIZES = (16, 64, 128, 256, 384, 512, 768, 1024)  # tokens; above, a step's work hides the host
SINGLE = 256  # largest size whose tokens attend one by one, each reading all that it sees
# tokens x context behind which a step is eager: 60 x 32,768 still take Kimi-Linear-48B 28 ms from a graph and 58
# without, and nothing beyond was measured (prefill.jsonl)
PAIRS = 1 << 21
_UNIT = 16  # tokens


def why_not(model: KimiForCausalLM, size: int) -> str | None:
    """The reason that a model's prompts of this size cannot be captured, or None."""
    chosen = {name: choice[0] for name, choice in model.selection.chosen.items()}
    if chosen["kda_prefill"] not in ("cuda", "chunked"):
        return f"kda_prefill={chosen['kda_prefill']} asks the host for lengths"
    if size > SINGLE:
        return None if chosen["mla_prefill"] == "cudnn" else f"mla_prefill={chosen['mla_prefill']} is not captured"
    # fixed splits would hold results for the longest context of every token
    return f"mla_step={chosen['mla_step']} holds too much" if model.ops.mla_step is None else None


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
        sizes: tokens; multiples of 16, and of a page above SINGLE. Fewer tokens are padded to the next size.
        max_len: longest sequence.
        vocab: ids below this may be chosen; None is all that the model has logits for.

    Raises:
        ValueError: a size that is not such a multiple.
    """

    def __init__(
        self, model: KimiForCausalLM, cache: Cache, sizes: Sequence[int], max_len: int, vocab: int | None = None
    ) -> None:
        if not sizes or any(size < _UNIT or size % (_UNIT if size <= SINGLE else PAGE) for size in sizes):
            needs = f"need at least one, all positive multiples of {_UNIT}, of {PAGE} above {SINGLE}"
            raise ValueError(f"prompt graph sizes {list(sizes)}: {needs}")
        self.model, self.cache, self.device, self.vocab = model, cache, cache.device, vocab
        self.sizes, self.max_len = sorted(set(sizes)), max_len
        self.saves = cache.snapshots > 0 and model.ops.prefill_saves
        self._graphs: dict[int, _Captured] = {}

    def size(self, replicas: Sequence[Sequence[tuple[Request, int]]]) -> int | None:
        """The graph that all attention replicas replay: each one's step is of one prompt, or of a part of one, or idle.

        None if none holds them, or fewer than half of the replicas have any.
        """
        busy = [segments for segments in replicas if segments]
        sizes = [size for segments in busy if (size := self._size(segments)) is not None]
        # what an idle replica computes meets few experts: most of them would hold up the others
        if not sizes or len(sizes) < len(busy) or 2 * len(busy) < len(replicas):
            return None
        size = max(sizes)
        # a square is from the first token on
        return size if size <= SINGLE or not any(request.computed for [(request, _)] in busy) else None

    def _size(self, segments: Sequence[tuple[Request, int]]) -> int | None:
        if len(segments) != 1:
            return None
        [(request, count)] = segments
        if request.decoding or request.params.prompt_logprobs is not None:
            return None
        size = next((size for size in self.sizes if size >= count), None)
        if size is None or not request.computed:
            return size
        return size if size <= SINGLE and count * (request.computed + count) <= PAIRS else None

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

    def run(
        self, request: Request | None, count: int, size: int
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """The next `count` tokens of a request, at most `size`: logits [1, vocab] of the last, `ops.pick` of them.

        The tensors are valid until the next run. Without a request the replica computes tokens of nobody beside others.
        """
        captured, host = self._graphs[size], self.host(size, request, count)
        captured.fields[: len(host)].copy_(host, non_blocking=True)
        captured.graph.replay()
        return captured.logits, captured.picked

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        logits = self.model(batch, self.cache.layers)
        return logits, pick(self.model, logits, self.vocab)

    def host(self, size: int, request: Request | None = None, count: int = 0) -> torch.Tensor:
        """int64: the fields of a request's next `count` tokens; without one, of a full size of tokens of nobody.

        Where tokens attend one by one, a request's block table is as wide as it needs.
        """
        total = self.max_len if request is None else request.computed + count
        width = pages_for(total) if size <= SINGLE else size // PAGE
        buffer = torch.zeros(_spans(size)[1] + width, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        fields = _split(buffer.numpy(), size)
        fields.slots[:] = fields.rows[:] = fields.chunks[:] = fields.kept[:] = -1
        if request is not None:
            _fill(fields, request, count)
        else:
            # equal tokens meet few experts
            fields.table[:], fields.offsets[1:], fields.wanted[0] = self.cache.pages, size, size - 1
        return buffer

    def batch(self, fields: torch.Tensor, size: int) -> Batch:
        """The pass over padded tokens; host lengths say how much room their segments may take, wherever they end."""
        f = _split(fields, size)
        whole = torch.tensor([0, size], device=self.device)
        square = Batch(
            tokens=f.tokens,
            segments=Segments((size - 1, 1), (size - 1, 0), f.offsets, f.ends),
            prefill=Segments((size,), (size,), whole, whole[1:]),
            decodes=0,
            slots=f.slots,
            block_table=f.table[None],
            rows=f.rows,
            wanted=f.wanted,
            moment=Moment(size, size, True),
            counts=(size,) * self.model.parallel.dp_size,
            saves=Saves(chunks=f.chunks, slots=f.kept, ends=f.cuts) if self.saves else None,
        )
        if size > SINGLE:
            return square
        return replace(square, block_table=f.table.expand(size, -1), sees=f.sees, moment=Moment(1, self.max_len, True))


class _Fields(NamedTuple):
    """What a replay reads: views into one buffer, of torch or numpy. The table is last, and the host's may be short."""

    tokens: Any
    rows: Any
    sees: Any
    chunks: Any
    offsets: Any
    ends: Any
    slots: Any
    wanted: Any
    kept: Any
    cuts: Any
    table: Any


def _counts(size: int) -> tuple[int, ...]:
    """Numbers in each field but the table. Chunks: those of tokens that leave one of padding, and of that."""
    return size, size, size, -(-size // PAGE) + 1, 3, 2, 2, 1, 1, 1


@cache
def _spans(size: int) -> tuple[list[slice], int]:
    """Where each field but the table stands in the buffer, and where the table starts."""
    return spans(_counts(size))


def _split(buffer: Any, size: int) -> _Fields:
    places, room = _spans(size)
    return _Fields._make([*(buffer[place] for place in places), buffer[room:]])


def _fill(fields: _Fields, request: Request, count: int) -> None:
    """Write a request's next `count` tokens over fields of nobody."""
    size, first = len(fields.tokens), request.computed
    pages = request.pages[: pages_for(first + count)]
    new = fields.tokens[:count]
    new[:] = request.next_tokens(count)
    # padding shall meet few experts of its own: equal tokens that see nothing stay equal, in a square no token does
    fields.tokens[count:] = new[-1] if size <= SINGLE else np.resize(new, size - count)
    fields.rows[:count], fields.sees[:count] = rows_of(pages, first, count), np.arange(first + 1, first + 1 + count)
    # what padding reads in a square must be finite wherever the request is: pages of its own
    fields.table[:], fields.table[: len(pages)] = pages[0], pages
    fields.offsets[1:], fields.ends[0] = (count, size), first + count
    fields.slots[0], fields.wanted[0] = request.slot, count - 1
    if request.saving is not None:
        depth, slot = request.saving
        fields.cuts[0], fields.kept[0], fields.chunks[(depth - first) // PAGE - 1] = depth - first, slot, slot
