"""CUDA graphs of decode steps at a ladder of sizes: static buffers in; logits and greedy choices out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from anabranch.engine.cache import Cache, pages_for, row_of
from anabranch.engine.request import Request
from anabranch.fusion.plan import Moment
from anabranch.layers.batch import Batch
from anabranch.models.kimi import KimiForCausalLM
from anabranch.ops.segments import Segments

T = TypeVar("T")
FIELDS = ("tokens", "slots", "rows", "ends")


def graph_ladder(largest: int) -> list[int]:
    """Sizes up to `largest`: a request is padded by at most a third."""
    steps = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    return [s for s in steps if s < largest] + [largest]


def record(run: Callable[[], T], stream: torch.cuda.Stream, pool: Any = None, mode: str = "global") -> tuple[Any, T]:
    """A graph of what `run` does, and the result whose memory every replay writes again.

    Graphs share the memory of one pool only if they were recorded on one stream.
    """
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(2):  # lazy set-up must not happen under capture
            run()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
        result = run()
    return graph, result


@dataclass(frozen=True, slots=True)
class _Captured:
    """One graph and the tensors that it reads and writes at every replay, which must outlive it."""

    graph: torch.cuda.CUDAGraph
    fields: torch.Tensor
    batch: Batch
    logits: torch.Tensor
    picked: tuple[torch.Tensor, torch.Tensor]


def capture_mode(model: KimiForCausalLM) -> str:
    """How strictly a capture forbids other work: the watchdog of a process group asks for its events meanwhile."""
    return "thread_local" if model.parallel.tp_size * model.parallel.pp_size > 1 else "global"


def pick(model: KimiForCausalLM, logits: torch.Tensor, vocab: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.pick` of every row among ids below `vocab`; a pipeline stage that hands on has no rows."""
    if not len(logits):
        return logits.new_empty(0, dtype=torch.int64), logits.new_empty(0, dtype=torch.float32)
    return model.ops.pick(logits[:, :vocab])


class DecodeGraphs:
    """One graph for each size, captured largest first so that they share memory.

    Args:
        sizes: requests a step; a smaller batch is padded to the next size with slot -1.
        max_len: longest sequence, which fixes the width of the block table.
        vocab: ids below this may be chosen; None is all that the model has logits for.
    """

    def __init__(
        self,
        model: KimiForCausalLM,
        cache: Cache,
        device: torch.device,
        sizes: Sequence[int],
        max_len: int,
        vocab: int | None = None,
    ) -> None:
        if not sizes or min(sizes) < 1:
            raise ValueError(f"graph sizes {list(sizes)}: need at least one, all positive")
        self.model, self.cache, self.device = model, cache, device
        self.sizes, self.width = sorted(set(sizes)), pages_for(max_len)
        # the path that a graph takes is frozen in it: it must suit every context that a replay may meet
        self._moment = Moment(1, max_len, True)
        self.vocab = vocab
        self._graphs: dict[int, _Captured] = {}

    def fits(self, count: int) -> bool:
        return count <= self.sizes[-1]

    def size(self, count: int) -> int:
        """The graph that `count` requests replay."""
        return next(s for s in self.sizes if s >= count)

    @torch.inference_mode()
    def capture(self) -> None:
        """Record every size. The cache is not written: every row is without a slot meanwhile."""
        pool, stream, mode = None, torch.cuda.Stream(self.device), capture_mode(self.model)
        for size in reversed(self.sizes):
            fields = self._host([], size, self.width).to(self.device)
            batch = self._batch(fields)
            graph, (logits, picked) = record(lambda batch=batch: self._forward(batch), stream, pool, mode)
            pool = pool or graph.pool()
            self._graphs[size] = _Captured(graph, fields, batch, logits, picked)

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        logits = self.model(batch, self.cache.layers)
        return logits, pick(self.model, logits, self.vocab)

    def run(
        self, requests: Sequence[Request], newest: torch.Tensor | None, size: int
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """One decode step of n requests, at most `size`: logits [n, vocab], and `ops.pick` of them.

        The tensors are valid until the next run.

        Args:
            newest: int64 [n] on the device, the tokens to continue from, where the requests do not know them yet.
            size: the graph to replay.
        """
        n = len(requests)
        captured = self._graphs[size]
        host = self._host(requests, size, max((len(r.pages) for r in requests), default=0))
        captured.fields[: len(host)].copy_(host, non_blocking=True)
        if newest is not None:
            captured.fields[0, :n].copy_(newest)
        captured.graph.replay()
        tokens, logprobs = captured.picked
        return captured.logits[:n], (tokens[:n], logprobs[:n])

    def _host(self, requests: Sequence[Request], size: int, pages: int) -> torch.Tensor:
        """int64 [fields + pages, size]; rows beyond the requests have no slot, no cache row and no length.

        What a shorter block table leaves of an older one is page numbers too, and no length reaches it.
        """
        buffer = torch.zeros(len(FIELDS) + pages, size, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        host, n = buffer.numpy(), len(requests)
        host[1:3] = -1
        if n:
            host[0, :n] = [r.next_tokens(1)[0] for r in requests]
            host[1, :n] = [r.slot for r in requests]
            host[2, :n] = [row_of(r.pages, r.computed) for r in requests]
            host[3, :n] = [r.computed + 1 for r in requests]
            for i, r in enumerate(requests):
                host[len(FIELDS) : len(FIELDS) + len(r.pages), i] = r.pages
        return buffer

    def _batch(self, fields: torch.Tensor) -> Batch:
        size = fields.shape[1]
        tokens, slots, rows, ends = fields[: len(FIELDS)]
        offsets = torch.arange(size + 1, device=self.device)
        segments = Segments((1,) * size, (0,) * size, offsets, ends)
        return Batch(
            tokens=tokens,
            segments=segments,
            prefill=Segments.of([], [], self.device),
            decodes=size,
            slots=slots,
            block_table=fields[len(FIELDS) :].T,
            rows=rows,
            wanted=None,
            moment=self._moment,
            counts=(size,) * self.model.parallel.dp_size,
        )
