"""Everything that compiles or tunes itself on first use, done before the cache takes the memory that is left."""

from dataclasses import replace

import torch

from anabranch.config.model import ModelConfig
from anabranch.engine.cache import PAGE, Cache, CacheShape, pages_for
from anabranch.layers.batch import Batch, Saves
from anabranch.models.kimi import KimiForCausalLM
from anabranch.ops.segments import Segments

GRAPH_RESERVE = 1 << 29  # bytes for the graphs' own pools and the library work spaces made later


@torch.inference_mode()
def warm_up(model: KimiForCausalLM, shape: CacheShape, *, prefill_chunk: int, max_seqs: int) -> int:
    """Run the largest prompt chunk and decode steps on a throw-away cache; bytes to keep free for activations."""
    device = next(model.parameters()).device
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    pages = pages_for(prefill_chunk)
    cache = Cache(model.config, model.parallel, shape, slots=1, pages=pages, device=device)
    held = torch.cuda.memory_allocated(device) - before
    for count in (prefill_chunk, 1):
        batch = _batch(model.config, [count], [0], 0, pages, device)
        model(batch, cache.layers)
        if model.ops.prefill_saves:  # kernels that save a state are others than those that do not
            model(replace(batch, saves=_nowhere(count, device)), cache.layers)
    for size in sorted({1, max_seqs}):
        # one live request, the others without a slot
        model(_batch(model.config, [1] * size, [0] + [-1] * (size - 1), size, pages, device), cache.layers)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before - held
    del cache
    torch.cuda.empty_cache()
    return peak + peak // 10 + GRAPH_RESERVE


def _nowhere(tokens: int, device: torch.device) -> Saves:
    """Everything a prompt may leave on its way, for no slot."""
    none, chunks = torch.tensor([-1], device=device), -(-tokens // PAGE)
    return Saves(chunks=none.repeat(chunks), slots=none, ends=torch.zeros_like(none))


def _batch(
    config: ModelConfig, lengths: list[int], slots: list[int], decodes: int, pages: int, device: torch.device
) -> Batch:
    count = sum(lengths)
    totals = [length if slot >= 0 else 0 for length, slot in zip(lengths, slots, strict=True)]
    rows = torch.arange(count, device=device)
    # distinct tokens, so that every expert is met
    tokens = torch.randint(0, config.vocab_size, (count,), generator=torch.Generator().manual_seed(0)).to(device)
    return Batch(
        tokens=tokens,
        segments=Segments.of(lengths, totals, device),
        prefill=Segments.of(lengths[decodes:], totals[decodes:], device),
        decodes=decodes,
        slots=torch.tensor(slots, device=device),
        block_table=torch.arange(pages, device=device).expand(len(lengths), -1),
        rows=torch.where(rows < pages * PAGE, rows, -1) if not decodes else torch.where(rows == 0, 0, -1),
        wanted=torch.arange(len(lengths), device=device),
    )
