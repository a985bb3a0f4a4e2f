"""Packing and the producer layouts at the shapes of the released models: no spills, few binaries for many prompts."""

import pytest
import torch

from anabranch.ops.conv.tile import parse
from anabranch.ops.conv.triton import conv, save_rows
from anabranch.ops.kda_inputs.triton import kda_inputs
from anabranch.ops.pack.triton import pack
from anabranch.ops.segments import Segments

HEADS = pytest.mark.parametrize("heads", [12, 32, 96])
D = 128


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@HEADS
def test_pack(compiled, heads):
    """Rows move as 16-byte words, and no prompt length needs another binary."""
    for tokens in (16384, 4096, 16385, 77):
        parts = meta(1, tokens, 3 * heads * D).split(heads * D, -1)
        beta = meta(1, tokens, 128 + heads + -heads % 16)[..., 128 : 128 + heads]
        pack([*(part.unflatten(-1, (heads, D)) for part in parts), beta])
    assert len({id(kernel) for kernel in compiled}) == 1
    for used in compiled.check():
        assert used.ptx.count("ld.global.v4.b32") >= 3


@HEADS
@pytest.mark.parametrize("layout", ["grouped", "normed", "rounded"])
def test_producer_layouts(compiled, heads, layout):
    weight, slots, pool = (
        meta(3 * heads * D, 4, dtype=torch.float32),
        meta(8, dtype=torch.int64),
        meta(16, 3, 3 * heads * D),
    )
    for lengths in ([2048] * 8, [1, 2, 3, 4, 5, 6, 7, 8], [1] * 8):
        wide = meta(sum(lengths), 4 * heads * D + 256)
        x, logits = wide[:, : 3 * heads * D], wide[:, 4 * heads * D + D : 4 * heads * D + D + heads]
        kda_inputs(x, Segments.of(lengths, device="meta"), slots, pool, weight, logits, layout)
    produce, replace = compiled[::2], compiled[1::2]
    assert len({id(kernel) for kernel in produce}) == len({id(kernel) for kernel in replace}) == 1
    ptx = compiled.check()[0].ptx
    # both walks: four rows before the loop, four in it and three of the history, from x or the window; none tap by tap
    assert ptx.count("ld.global.v2.b32") == 2 * (4 + 4 + 2 * 3)


@HEADS
def test_saved_windows(compiled, heads):
    for count in (1, 3):
        slots, ends = meta(count, dtype=torch.int64), meta(count, dtype=torch.int64)
        save_rows(meta(1000, 5 * heads * D)[:, : 3 * heads * D], slots, ends, meta(16, 3, 3 * heads * D))
    assert len({id(kernel) for kernel in compiled}) == 1
    compiled.check()


@pytest.mark.parametrize("name", ["S8R32W4", "S4R32W4", "S8R16W8", "S16R16W8", "S4R32W2"])
def test_other_tiles_fit(compiled, name):
    x, pool = meta(300, 36 * D), meta(16, 3, 36 * D)
    weight, slots = meta(36 * D, 4, dtype=torch.float32), meta(2, dtype=torch.int64)
    segments, tile = Segments.of([200, 100], device="meta"), parse(name)
    for layout in ("grouped", "normed", "rounded"):
        kda_inputs(x, segments, slots, pool, weight, meta(300, 12), layout, tile)
    conv(x, segments, slots, pool, weight, tile)
    compiled.check()
