"""CUDA graphs of decode steps at a ladder of sizes: static buffers in, logits out, unused rows without a slot."""

from collections.abc import Sequence

import numpy as np
import torch

from anabranch.engine.cache import PAGE, Cache, pages_for
from anabranch.engine.request import Request
from anabranch.fusion.plan import Moment
from anabranch.layers.batch import Batch
from anabranch.models.kimi import KimiForCausalLM
from anabranch.ops.segments import Segments

FIELDS = ("tokens", "slots", "rows", "ends")


def graph_ladder(largest: int) -> list[int]:
    """Sizes up to `largest`: a request is padded by at most a third."""
    steps = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    return [s for s in steps if s < largest] + [largest]


class DecodeGraphs:
    """One graph for each size, captured largest first so that they share memory.

    Args:
        sizes: requests a step; a smaller batch is padded to the next size with slot -1.
        max_len: longest sequence, which fixes the width of the block table.
    """

    def __init__(self, model: KimiForCausalLM, cache: Cache, device: torch.device, sizes: Sequence[int], max_len: int):
        if not sizes or min(sizes) < 1:
            raise ValueError(f"graph sizes {list(sizes)}: need at least one, all positive")
        self.model, self.cache, self.device = model, cache, device
        self.sizes, self.width = sorted(set(sizes)), pages_for(max_len)
        # the path that a graph takes is frozen in it: it must suit every context that a replay may meet
        self._moment = Moment(1, max_len, True)
        largest = self.sizes[-1]
        self._host = torch.zeros(len(FIELDS) + self.width, largest, dtype=torch.int64, pin_memory=True)
        self._device = torch.zeros_like(self._host, device=device)
        # the batch stays too: a graph reads its tensors at every replay
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, Batch]] = {}

    def fits(self, count: int) -> bool:
        return count <= self.sizes[-1]

    @torch.inference_mode()
    def capture(self) -> None:
        """Record every size. The cache is not written: every row is without a slot meanwhile."""
        self._fill([])
        pool, stream = None, torch.cuda.Stream(self.device)
        for size in reversed(self.sizes):
            batch = self._batch(size)
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                for _ in range(2):  # lazy set-up must not happen under capture
                    self.model(batch, self.cache.layers)
            torch.cuda.current_stream(self.device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                logits = self.model(batch, self.cache.layers)
            pool = pool or graph.pool()
            self._graphs[size] = graph, logits, batch

    def run(self, requests: Sequence[Request]) -> tuple[torch.Tensor, int]:
        """Logits [n, vocab] of one decode step of n requests, valid until the next run; and the size replayed."""
        size = next(s for s in self.sizes if s >= len(requests))
        self._fill(requests)
        graph, logits, _ = self._graphs[size]
        graph.replay()
        return logits[: len(requests)], size

    def _fill(self, requests: Sequence[Request]) -> None:
        """One copy to the device; rows beyond the requests have no slot, no cache row and no length."""
        host = self._host.numpy()
        host[0], host[1:3], host[3:] = 0, -1, 0
        n = len(requests)
        if n:
            at = np.array([r.computed for r in requests])
            host[0, :n] = [r.sampled[-1].token for r in requests]
            host[1, :n] = [r.slot for r in requests]
            host[2, :n] = [r.pages[r.computed // PAGE] * PAGE + r.computed % PAGE for r in requests]
            host[3, :n] = at + 1
            for i, r in enumerate(requests):
                host[len(FIELDS) : len(FIELDS) + len(r.pages), i] = r.pages
        self._device.copy_(self._host, non_blocking=True)

    def _batch(self, size: int) -> Batch:
        tokens, slots, rows, ends = (self._device[i, :size] for i in range(len(FIELDS)))
        offsets = torch.arange(size + 1, device=self.device)
        segments = Segments((1,) * size, (0,) * size, offsets, ends)
        return Batch(
            tokens=tokens,
            segments=segments,
            prefill=Segments.of([], [], self.device),
            decodes=size,
            slots=slots,
            block_table=self._device[len(FIELDS) :, :size].T,
            rows=rows,
            wanted=offsets[:-1],
            moment=self._moment,
        )
