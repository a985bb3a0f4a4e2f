"""The short convolution against PyTorch's own conv1d, and its history across segments of every length."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.ops.conv.reference import conv, save_rows
from anabranch.ops.conv.spec import CONV, CONV_SAVE
from anabranch.ops.segments import Segments

C, K = 6, 4


def whole(u: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The definition, by torch: left padding, cross-correlation, SiLU."""
    padded = F.pad(u.T[None], (K - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], groups=C))[0].T


def test_equals_conv1d():
    u, w = torch.randn(11, C), torch.randn(C, K)
    pool = torch.zeros(2, K - 1, C)
    CONV.equality.check(conv(u, Segments.of([11]), torch.tensor([1]), pool, w), whole(u, w))
    assert torch.equal(pool[1], u[-3:])
    assert not pool[0].any()


@pytest.mark.parametrize("length", [1, 2])
def test_a_short_segment_keeps_older_history(length):
    u, w = torch.randn(5 + length, C), torch.randn(C, K)
    pool = torch.zeros(1, K - 1, C)
    slot = torch.tensor([0])
    conv(u[:5], Segments.of([5]), slot, pool, w)
    conv(u[5:], Segments.of([length]), slot, pool, w)
    assert torch.equal(pool[0], u[-3:])


@pytest.mark.parametrize("length", [1, 2])
def test_a_short_first_segment_keeps_zeros_before_it(length):
    u, w = torch.randn(length, C), torch.randn(C, K)
    pool = torch.zeros(1, K - 1, C)
    conv(u, Segments.of([length]), torch.tensor([0]), pool, w)
    assert not pool[0, : 3 - length].any()
    assert torch.equal(pool[0, 3 - length :], u)


@settings(max_examples=60, deadline=None)
@given(
    plan=st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=4), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
)
def test_any_split_of_a_ragged_batch_equals_the_whole(plan, order):
    """plan[s] lists the segment lengths of sequence s; step i runs segment i of every sequence that has one."""
    torch.manual_seed(0)
    w = torch.randn(C, K)
    inputs = [torch.randn(sum(lengths), C) for lengths in plan]
    slots = list(range(len(plan)))
    order.shuffle(slots)
    pool = torch.zeros(len(plan) + 1, K - 1, C)
    pool[-1] = 7.0  # a canary slot that no segment uses
    got = [[] for _ in plan]
    for step in range(max(map(len, plan))):
        active = [s for s, lengths in enumerate(plan) if step < len(lengths)]
        lengths = [plan[s][step] for s in active]
        starts = [sum(plan[s][:step]) for s in active]
        x = torch.cat([inputs[s][a : a + n] for s, a, n in zip(active, starts, lengths, strict=True)])
        y = conv(x, Segments.of(lengths), torch.tensor([slots[s] for s in active]), pool, w)
        for s, part in zip(active, y.split(lengths), strict=True):
            got[s].append(part)
    for s, u in enumerate(inputs):
        CONV.equality.check(torch.cat(got[s]), whole(u, w))
    assert (pool[-1] == 7.0).all()


def test_no_slot_is_zero_and_touches_nothing():
    u, w = torch.randn(6, C), torch.randn(C, K)
    u[2:4] = float("nan")
    pool = torch.randn(3, K - 1, C)
    before = pool.clone()
    y = conv(u, Segments.of([2, 2, 2]), torch.tensor([0, -1, 2]), pool, w)
    assert torch.equal(y[2:4], torch.zeros(2, C))
    assert y.isfinite().all()
    assert torch.equal(pool[1], before[1])
    assert torch.equal(pool[0], torch.cat([before[0], u[:2]])[-3:])


def test_strided_rows_in_bf16():
    wide = torch.randn(9, 2 * C).bfloat16()
    w = torch.randn(C, K)
    pool = torch.zeros(1, K - 1, C, dtype=torch.bfloat16)
    y = conv(wide[:, C:], Segments.of([9]), torch.tensor([0]), pool, w)
    assert y.dtype == torch.bfloat16
    CONV.equality.check(y, whole(wide[:, C:].float(), w).bfloat16())


def test_windows_are_saved_on_the_way():
    x, pool = torch.randn(20, 2 * C)[:, :C], torch.full((5, K - 1, C), torch.nan)
    save_rows(x, torch.tensor([4, -1, 1]), torch.tensor([3, 999, 17]), pool)
    CONV_SAVE.equality.check(pool[4], x[:3].contiguous())
    CONV_SAVE.equality.check(pool[1], x[14:17].contiguous())
    assert pool[[0, 2, 3]].isnan().all()
    ending = torch.zeros(1, K - 1, C)
    conv(x[:17], Segments.of([17]), torch.tensor([0]), ending, torch.randn(C, K))
    assert torch.equal(ending[0], pool[1])
