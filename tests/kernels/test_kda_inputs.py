"""Producer layouts in Triton's interpreter: the values of the chain, dense, whatever the segments and the padding.

Numbers of checks refer to the functional specification, section 7.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.ops.conv.triton import conv
from anabranch.ops.kda_inputs import deterministic, reference, triton
from anabranch.ops.kda_inputs.spec import KDA_INPUTS, VALUES
from anabranch.ops.segments import Segments

H, D = 3, 16
C = 3 * H * D
LAYOUTS = pytest.mark.parametrize("layout", ["grouped", "normed", "rounded"])


def inputs(tokens: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """x and beta logits as slices of wide rows, a pool of 7 slots and the weight."""
    torch.manual_seed(seed)
    wide = torch.randn(tokens, C + 37).to(dtype)
    return wide[:, :C], wide[:, C + 16 : C + 16 + H], torch.randn(7, 3, C).to(dtype), torch.randn(C, 4)


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[9], [1, 1, 1, 1, 1], [1, 2, 7, 3, 1], [4, 0, 2], [2, 285, 95]])
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
    got = triton.kda_inputs(x, segments, slots, own, weight, logits, layout)
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


def test_without_a_slot_all_is_zero_and_nothing_is_touched():
    x, logits, pool, weight = inputs(6)
    x[2:4], logits[2:4] = float("nan"), float("nan")
    before, slots = pool.clone(), torch.tensor([2, 9, -1, 9, 0])[::2]
    for module in (triton, reference):
        own = before.clone()
        for out in module.kda_inputs(x, Segments.of([2, 2, 2]), slots, own, weight, logits):
            assert not out[2:4].any()
            assert out.isfinite().all()
        assert torch.equal(own[[1, 3, 4, 5, 6]], before[[1, 3, 4, 5, 6]])


@settings(max_examples=12, deadline=None)
@given(cuts=st.lists(st.integers(1, 6), min_size=1, max_size=5), layout=st.sampled_from(["normed", "rounded"]))
def test_bits_do_not_know_how_a_sequence_was_cut(cuts, layout):
    """Check 32: beside another sequence, in any pieces, from a window that was carried over."""
    x, logits, _, weight = inputs(sum(cuts))
    whole_pool, pool, at, parts = torch.zeros(1, 3, C).bfloat16(), torch.zeros(2, 3, C).bfloat16(), 0, []
    whole = triton.kda_inputs(x, Segments.of([sum(cuts)]), torch.tensor([0]), whole_pool, weight, logits, layout)
    for count in cuts:
        rows = slice(at, at + count)
        both, strengths = torch.cat([x[:1], x[rows]]), torch.cat([logits[:1], logits[rows]])
        out = triton.kda_inputs(both, Segments.of([1, count]), torch.tensor([0, 1]), pool, weight, strengths, layout)
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
