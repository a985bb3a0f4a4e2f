"""The chunked prefill compiled for an H200: both kernels fit, and what they spill is known."""

import pytest
import torch

from anabranch.ops.kda_prefill.chunked import BOUNDED, GIVEN, SOFTPLUS, Config, Prefill
from anabranch.ops.segments import Segments

D, BATCH, SLOTS, T = 128, 3, 16, 210
SPILLS = {"prepare": 480, "chain": 160}  # bytes a thread at 255 registers; a program works on tiles of 64 x 128


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def compiled_prefill(heads: int, gate: int, state: torch.dtype = torch.float32, saves: bool = False, **config: int):
    """Both launches on slices of a convolution's rows."""
    q, k, v = (t.unflatten(1, (heads, D)) for t in meta(T, 3 * heads * D).split(heads * D, 1))
    segments, slots = Segments.of([70] * BATCH, device="meta"), meta(BATCH, dtype=torch.int64)
    chunks = meta(2 * BATCH, dtype=torch.int64) if saves else None
    pool = meta(SLOTS, heads, D, D, dtype=state)
    call = Prefill(v, meta(T, heads, D), segments, slots, pool, chunks, Config(**config))
    per_head = (meta(heads * D, dtype=torch.float32), meta(heads, dtype=torch.float32))
    call.run(q, k, meta(T, heads, D), meta(T, heads + 4)[:, :heads], *per_head, gate, -5.0)


@pytest.mark.parametrize("heads", [12, 32, 96])
@pytest.mark.parametrize("gate", [GIVEN, SOFTPLUS, BOUNDED])
def test_both_kernels_fit(compiled, heads, gate):
    compiled_prefill(heads, gate, state=torch.bfloat16 if heads == 32 else torch.float32)
    used = compiled.usage()
    assert [u.name for u in used] == ["prepare", "chain"]
    for u in used:
        assert u.shared <= 232_448, u.name
        assert u.spilled <= SPILLS[u.name], (u.name, u.spilled)
        assert u.ptx.count("wgmma.mma_async") >= 28, f"{u.name} does not use the tensor cores of Hopper"


@pytest.mark.parametrize("config", [{"rows": 128, "chain_warps": 8}, {"stages": 3}, {"stages": 1}])
def test_other_launches_of_the_chain_fit_too(compiled, config):
    compiled_prefill(12, BOUNDED, saves=True, **config)
    assert compiled.usage()[1].shared <= 232_448


def test_one_binary_for_every_batch(compiled):
    """Bits of a chunk must not depend on what else is in the batch, so neither kernel is specialised on it."""
    for lengths in ([1], [16] * 16, [64, 3]):
        segments, tokens = Segments.of(lengths, device="meta"), sum(lengths)
        q, k, v = (t.unflatten(1, (12, D)) for t in meta(tokens, 36 * D).split(12 * D, 1))
        slots = meta(len(lengths), dtype=torch.int64)
        pool = meta(SLOTS, 12, D, D, dtype=torch.float32)
        call = Prefill(v, meta(tokens, 12, D), segments, slots, pool, config=Config())
        per_head = (meta(12 * D, dtype=torch.float32), meta(12, dtype=torch.float32))
        call.run(q, k, meta(tokens, 12, D), meta(tokens, 12), *per_head, BOUNDED, -5.0)
    assert len({id(kernel) for kernel in compiled}) == 2
