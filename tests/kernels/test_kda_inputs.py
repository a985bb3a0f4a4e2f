"""Producer layouts in Triton's interpreter: the values of the chain, dense, whatever the segments and the padding.

Numbers of checks refer to the functional specification, section 7.
"""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.ops.conv import reference as conv_reference
from anabranch.ops.conv import triton as conv_triton
from anabranch.ops.conv.spec import CONV_SAVE
from anabranch.ops.conv.tile import TILE, Tile, parse
from anabranch.ops.kda_inputs import deterministic, reference, triton
from anabranch.ops.kda_inputs.spec import KDA_INPUTS, VALUES
from anabranch.ops.segments import Segments

H, D = 2, 16
C = 3 * H * D
# the interpreter pays for every program and step: short segments take pieces of 16 tokens
SHORT = Tile(streams=4, run=4, warps=1)
conv, kda_inputs = (partial(run, tile=SHORT) for run in (conv_triton.conv, triton.kda_inputs))
LAYOUTS = pytest.mark.parametrize("layout", ["grouped", "normed", "rounded"])


def inputs(tokens: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """x and beta logits as slices of wide rows, a pool of 7 slots and the weight."""
    torch.manual_seed(seed)
    wide = torch.randn(tokens, C + 37).to(dtype)
    return wide[:, :C], wide[:, C + 16 : C + 16 + H], torch.randn(7, 3, C).to(dtype), torch.randn(C, 4)


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[9], [1, 1, 1, 1, 1], [1, 2, 7, 3, 1], [4, 0, 2], [2, 70, 23]])
def test_values_are_those_of_the_chain(lengths, dtype, layout):
    """Check 20 as well: two rows of padding hold NaN; they are zero in every output and touch no state."""
    x, logits, pool, weight = inputs(sum(lengths) + 2, dtype)
    x[sum(lengths) :], logits[sum(lengths) :] = float("nan"), float("nan")
    segments, slots, own, want_pool = (
        Segments.of(lengths),
        torch.randperm(7)[: len(lengths)],
        pool.clone(),
        pool.clone(),
    )
    tile = parse("S4R8W4") if max(lengths) > 16 else SHORT
    got = triton.kda_inputs(x, segments, slots, own, weight, logits, layout, tile)
    want = reference.kda_inputs(x, segments, slots, want_pool, weight, logits, layout)
    for name, a, b in zip(("q", "k", "v", "beta"), got, want, strict=True):
        assert a.is_contiguous(), name
        KDA_INPUTS.equality.check(a, b, name)
        assert not a[sum(lengths) :].any(), name
    assert torch.equal(own, want_pool)
    conv_pool = pool.clone()
    mixed = conv(x[: sum(lengths)], segments, slots, conv_pool, weight)
    q, k, v = (part.unflatten(1, (H, D)) for part in mixed.chunk(3, 1))
    VALUES.check(got[2][: sum(lengths)], v, "v")
    if layout == "grouped":
        VALUES.check(got[0][: sum(lengths)], q, "q")
        VALUES.check(got[1][: sum(lengths)], k, "k")
    assert torch.equal(conv_pool, own)


def test_windows_are_saved_on_the_way():
    """Channels are no multiple of a block; slots without a window keep what they hold."""
    x, _, pool, _ = inputs(200)
    for own, slots, ends in ((pool, [4, -1, 0], [64, 10**9, 200]), (pool[:, :2], [6], [3]), (pool[:, :1], [2], [1])):
        got, want = own.clone(), own.clone()
        conv_triton.save_rows(x, torch.tensor(slots), torch.tensor(ends), got)
        conv_reference.save_rows(x, torch.tensor(slots), torch.tensor(ends), want)
        CONV_SAVE.equality.check(got, want, "pool")
        assert not torch.equal(got, own)


def test_without_a_slot_all_is_zero_and_nothing_is_touched():
    x, logits, pool, weight = inputs(6)
    x[2:4], logits[2:4] = float("nan"), float("nan")
    before, slots = pool.clone(), torch.tensor([2, 9, -1, 9, 0])[::2]
    for run in (kda_inputs, reference.kda_inputs):
        own = before.clone()
        for out in run(x, Segments.of([2, 2, 2]), slots, own, weight, logits):
            assert not out[2:4].any()
            assert out.isfinite().all()
        assert torch.equal(own[[1, 3, 4, 5, 6]], before[[1, 3, 4, 5, 6]])


@settings(max_examples=3, deadline=None)
@given(cuts=st.lists(st.integers(1, 6), min_size=1, max_size=4), layout=st.sampled_from(["normed", "rounded"]))
def test_bits_do_not_know_how_a_sequence_was_cut(cuts, layout):
    """Check 32: beside another sequence, in any pieces, from a window that was carried over."""
    x, logits, _, weight = inputs(sum(cuts))
    whole_pool, pool, at, parts = torch.zeros(1, 3, C).bfloat16(), torch.zeros(2, 3, C).bfloat16(), 0, []
    whole = kda_inputs(x, Segments.of([sum(cuts)]), torch.tensor([0]), whole_pool, weight, logits, layout)
    for count in cuts:
        rows = slice(at, at + count)
        both, strengths = torch.cat([x[:1], x[rows]]), torch.cat([logits[:1], logits[rows]])
        out = kda_inputs(both, Segments.of([1, count]), torch.tensor([0, 1]), pool, weight, strengths, layout)
        parts.append([t[1:] for t in out])
        at += count
    for i, want in enumerate(whole):
        assert torch.equal(torch.cat([part[i] for part in parts]), want)
    assert torch.equal(pool[1], whole_pool[0])


def test_the_deterministic_form_is_the_reference_in_a_fixed_order():
    x, logits, pool, weight = inputs(5)
    got = deterministic.kda_inputs(x, Segments.of([5]), torch.tensor([1]), pool.clone(), weight, logits)
    want = reference.kda_inputs(x, Segments.of([5]), torch.tensor([1]), pool.clone(), weight, logits)
    for a, b in zip(got, want, strict=True):
        KDA_INPUTS.equality.check(a, b)


@pytest.mark.parametrize("name", ["S2R32W1", TILE.name])
def test_no_tile_changes_a_bit(name):
    """Pieces that end inside a stream, between streams and behind the segment; the second segment has no slot."""
    x, logits, pool, weight = inputs(40)
    segments, slots, pools = Segments.of([35, 3, 1]), torch.tensor([5, -1, 2]), (pool.clone(), pool.clone())
    want = kda_inputs(x, segments, slots, pools[0], weight, logits, "rounded", tile=Tile(streams=16, run=4, warps=2))
    got = triton.kda_inputs(x, segments, slots, pools[1], weight, logits, "rounded", parse(name))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert torch.equal(*pools)


@pytest.mark.parametrize("taps", [2, 3])
def test_fewer_taps(taps):
    x, logits, pool, weight = inputs(7)
    pool, weight = pool[:, : taps - 1].contiguous(), weight[:, :taps].contiguous()
    for lengths in ([5, 2], [1] * 7):
        segments, slots, pools = Segments.of(lengths), torch.randperm(7)[: len(lengths)], (pool.clone(), pool.clone())
        got = kda_inputs(x, segments, slots, pools[0], weight, logits, "grouped")
        want = reference.kda_inputs(x, segments, slots, pools[1], weight, logits, "grouped")
        for name, a, b in zip(("q", "k", "v", "beta"), got, want, strict=True):
            KDA_INPUTS.equality.check(a, b, name)
        assert torch.equal(*pools)
        alone = conv_triton.conv(x, segments, slots, pool.clone(), weight, SHORT)
        VALUES.check(got[2].flatten(1), alone[:, 2 * H * D :], "v")


def test_what_the_kernels_were_not_made_for():
    x, logits, pool, weight = inputs(3)
    for wrong in (weight[:, :1], torch.cat([weight, weight[:, :1]], 1)):
        with pytest.raises(ValueError, match=rf"conv: the weight has {wrong.shape[1]} taps, accepted are 2 to 4"):
            kda_inputs(x, Segments.of([3]), torch.tensor([0]), pool, wrong, logits)
        with pytest.raises(ValueError, match=rf"conv: the weight has {wrong.shape[1]} taps, accepted are 2 to 4"):
            conv(x, Segments.of([3]), torch.tensor([0]), pool, wrong)
    for name in ("8R16W4", "S8R2W4", "S3R16W4", "S2R4W1", "S8R16W32"):
        with pytest.raises(ValueError, match=f"tile '?{name}'?: accepted "):
            parse(name)
    assert parse(TILE.name) == TILE
