"""Producer layouts on a real GPU: the chain's values at true shapes, padding, windows, graph replay."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from anabranch.ops.conv.triton import conv
from anabranch.ops.kda_inputs import reference
from anabranch.ops.kda_inputs.spec import KDA_INPUTS, VALUES
from anabranch.ops.kda_inputs.triton import kda_inputs
from anabranch.ops.segments import Segments

D = 128


def inputs(tokens: int, heads: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(tokens)
    width = heads * D
    wide = torch.randn(tokens, 4 * width + 256, device="cuda").bfloat16()
    pool = torch.randn(20, 3, 3 * width, device="cuda").bfloat16()
    return wide[:, : 3 * width], wide[:, -heads:], pool, torch.randn(3 * width, 4, device="cuda")


@pytest.mark.parametrize("heads", [3, 12, 32, 96])
@pytest.mark.parametrize("layout", ["grouped", "normed", "rounded"])
@pytest.mark.parametrize("lengths", [[2048], [1, 300, 2, 7], [1] * 9, [2, 285, 95]])
def test_values_are_those_of_the_chain(heads, layout, lengths, monkeypatch):
    """Check 20: two rows of padding hold NaN and reach neither outputs nor windows.

    The chain is the Triton convolution and the reference norm: a value that another convolution rounds the other way
    would move the whole row.
    """
    monkeypatch.setattr(reference, "conv", conv)
    used = sum(lengths)
    x, logits, pool, weight = inputs(used + 2, heads)
    x[used:], logits[used:] = float("nan"), float("nan")
    segments, slots = Segments.of(lengths, device="cuda"), torch.randperm(20, device="cuda")[: len(lengths)]
    pools = [pool.clone() for _ in range(3)]
    got = kda_inputs(x, segments, slots, pools[0], weight, logits, layout)
    want = reference.kda_inputs(x, segments, slots, pools[1], weight, logits, layout)
    for name, a, b in zip(("q", "k", "v", "beta"), got, want, strict=True):
        assert a.is_contiguous(), name
        KDA_INPUTS.equality.check(a, b, name)
        assert not a[used:].any(), name
    mixed = conv(x[:used], segments, slots, pools[2], weight).unflatten(1, (3, heads, D))
    VALUES.check(got[2][:used], mixed[:, 2], "v")
    assert torch.equal(pools[0], pools[1])
    assert torch.equal(pools[0], pools[2])


@pytest.mark.parametrize("layout", ["normed", "rounded"])
def test_bits_do_not_know_how_a_sequence_was_cut(layout):
    x, logits, pool, weight = inputs(130, 12)
    one, two, slot = pool.clone(), pool.clone(), torch.tensor([3], device="cuda")
    whole = kda_inputs(x, Segments.of([130], device="cuda"), slot, one, weight, logits, layout)
    parts = []
    for first, last in ((0, 1), (1, 64), (64, 66), (66, 130)):
        part = Segments.of([last - first], device="cuda")
        parts.append(kda_inputs(x[first:last], part, slot, two, weight, logits[first:last], layout))
    for i, want in enumerate(whole):
        assert torch.equal(torch.cat([p[i] for p in parts]), want)
    assert torch.equal(one, two)


def test_replay_with_changed_inputs():
    """Check 19: outputs are poisoned inside the capture."""
    x, logits, pool, weight = inputs(100, 12)
    segments, slots, live, plain = (
        Segments.of([60, 40], device="cuda"),
        torch.tensor([4, 0], device="cuda"),
        pool,
        pool.clone(),
    )
    kda_inputs(x, segments, slots, pool.clone(), weight, logits, "rounded")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kda_inputs(x, segments, slots, live, weight, logits, "rounded")
    for _ in range(3):
        x.mul_(0.9)
        graph.replay()
        want = kda_inputs(x, segments, slots, plain, weight, logits, "rounded")
        assert all(torch.equal(a, b) for a, b in zip(out, want, strict=True))
        assert torch.equal(live, plain)
