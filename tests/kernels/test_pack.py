"""Packing in Triton's interpreter: bits survive, dense tensors come back as they are, the rest is copied and counted.

Numbers of checks refer to the functional specification, section 7.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.ops.pack import reference, triton
from anabranch.ops.pack.spec import PACK, counts, floor

EVERY_16 = torch.arange(-(2**15), 2**15).to(torch.int16)  # all bf16 and fp16 values: NaN payloads, subnormals, -0


@pytest.fixture(autouse=True)
def _counted():
    counts.clear()


def same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.is_contiguous()
    PACK.equality.check(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern_survives(dtype):
    """Check 17."""
    wide = EVERY_16.view(dtype).view(64, 1024)
    parts = wide.split([128, 512, 300, 84], 1)
    packed = triton.pack(parts)
    for got, want in zip(packed, parts, strict=True):
        same_bits(got, want)
    assert counts == {"packed": 4, "launches": 1, "copied": 0}


def test_fp32_patterns_survive():
    """Check 17: quiet and signalling NaN with payloads, infinities, the smallest subnormals, both zeros."""
    patterns = [0x7FC12345, 0x7F812345, -0x3FEDCB, 0x7F800000, -0x800000, 1, -(2**31) + 1, 0, -(2**31), 0x3F800001]
    wide = torch.tensor(patterns, dtype=torch.int32).repeat(7, 12).view(torch.float32)
    parts = wide[:, :37], wide[:, 37:]
    for got, want in zip(triton.pack(parts), parts, strict=True):
        same_bits(got, want)
    assert counts["launches"] == 1


def test_dense_tensors_come_back_as_they_are_and_one_strided_is_an_ordinary_copy():
    """Checks 10, 17: a slice with one row is dense whatever its stride says."""
    dense, wide = torch.randn(4, 6), torch.randn(4, 12)
    one_row = wide[:1, :5]
    out = triton.pack((dense, one_row, wide[:, :5]))
    assert out[0] is dense
    assert out[1] is one_row
    assert torch.equal(out[2], wide[:, :5])
    assert counts == {"copied": 1}
    assert triton.pack(()) == ()
    assert triton.pack((dense,))[0] is dense
    assert counts["launches"] == 0


def test_empty_and_differently_typed_tensors_in_one_launch():
    empty, beta = torch.randn(0, 9)[:, :3], torch.randn(5, 9)[:, 2:5]
    q = torch.randn(5, 48).bfloat16()[:, :16].unflatten(1, (2, 8))
    out = triton.pack((q, empty, beta))
    for got, want in zip(out, (q, empty, beta), strict=True):
        same_bits(got, want)
    assert out[1] is empty
    assert counts["launches"] == 1


def test_what_cannot_be_packed_is_copied_and_counted(monkeypatch):
    wide = torch.randn(6, 8)
    parts = [wide[:, :3], wide[:, 4:6]]
    odd = [
        torch.arange(12).view(3, 4)[:, :2],
        torch.randn(2, 3, 4, 5).permute(3, 1, 0, 2),
        wide[:, 1:2].T.requires_grad_(),
    ]
    got = triton.pack([*parts, *odd])
    assert all(torch.equal(a, b) for a, b in zip(got, [*parts, *odd], strict=True))
    assert counts["refused: dtype"] == counts["refused: more than three dimensions that do not merge"] == 1
    assert counts["launches"] == 1
    counts.clear()
    with_grad = wide.clone().requires_grad_()
    triton.pack((with_grad[:, :3], with_grad[:, 3:]))[0].sum().backward()
    assert with_grad.grad is not None
    assert counts == {"refused: autograd": 2, "copied": 2}
    counts.clear()
    monkeypatch.setattr(triton, "MOST_TILES", 1)
    assert torch.equal(triton.pack(parts)[0], parts[0])
    assert counts == {"copied": 2}


def test_more_than_a_launch_takes():
    wide = torch.randn(3, 100)
    parts = [wide[:, i : i + 5] for i in range(10)]
    for got, want in zip(triton.pack(parts), parts, strict=True):
        same_bits(got, want)
    assert counts == {"packed": 8, "launches": 1, "copied": 2}


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_tuple_of_views_is_packed_in_order(data):
    torch.manual_seed(0)
    views = []
    for _ in range(data.draw(st.integers(1, 5))):
        shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
        base = torch.randn([n * data.draw(st.integers(1, 3)) for n in shape])
        view = base[tuple(slice(None, None, base.shape[i] // n) for i, n in enumerate(shape))]
        if data.draw(st.booleans()):
            view = view.permute(data.draw(st.permutations(range(view.ndim))))
        views.append(view.to(data.draw(st.sampled_from([torch.float32, torch.bfloat16]))))
    for got, want, source in zip(triton.pack(views), reference.pack(views), views, strict=True):
        same_bits(got, want)
        assert got is source or not source.is_contiguous()


def test_floor_counts_only_what_moves():
    wide = torch.randn(4, 6)
    assert floor((wide, wide[:, :3])).bytes == 2 * 4 * 3 * 4
