"""Prefill in squares and rectangles, with plain attention in the library's place, and the merge in the interpreter."""

import pytest
import torch

from anabranch.ops.mla import cudnn, reference
from anabranch.ops.mla.spec import MLA_PREFILL
from anabranch.ops.segments import Segments

HEADS, NOPE, ROPE, V, RANK, PAGE = 3, 24, 16, 20, 32, 16


def attend(q, k, v, *, causal, sums):
    """What the library is trusted to do; a rectangle must not be causal, and every value must be finite."""
    assert len(q) % cudnn.MULTIPLE == 0
    assert all(t.isfinite().all() for t in (q, k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k.float()) * q.shape[-1] ** -0.5
    if causal:
        assert len(q) == len(k)
        scores = scores.masked_fill(torch.ones(len(q), len(k), dtype=torch.bool).triu(1), -torch.inf)
    o = torch.einsum("hnm,mhe->nhe", scores.softmax(-1), v.float()).to(q.dtype)
    return o, scores.logsumexp(-1) if sums else torch.empty(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stretch", [1000, 32, 7])
def test_prefill_equals_the_reference(dtype, stretch, monkeypatch):
    """New sequences, one new token, several behind contexts of one and many stretches."""
    torch.manual_seed(0)
    monkeypatch.setattr(cudnn, "attend", attend)
    monkeypatch.setattr(cudnn, "STRETCH", stretch)
    monkeypatch.setattr(cudnn, "MULTIPLE", 8)
    lengths, totals = [5, 1, 8, 3], [5, 40, 72, 3 + 2 * PAGE]
    wide = torch.randn(sum(lengths), HEADS * (NOPE + ROPE) + 8).to(dtype)
    q = wide[:, : HEADS * (NOPE + ROPE)].unflatten(1, (HEADS, NOPE + ROPE))
    pages = torch.randn(21, PAGE, RANK + ROPE).to(dtype)
    kv_b = (torch.randn(HEADS, NOPE + V, RANK) * 0.2).to(dtype)
    table, segments = torch.randperm(20).view(4, 5), Segments.of(lengths, totals)
    for row, total in zip(table, totals, strict=True):
        pages[row[total // PAGE], total % PAGE :] = torch.nan  # rows that are not written yet
    got = cudnn.mla_prefill(q, segments, table, pages, kv_b)
    MLA_PREFILL.equality.check(got, reference.mla_prefill(q, segments, table, pages, kv_b))
    for i, at in enumerate((0, 5, 6, 14)):
        one = Segments.of(lengths[i : i + 1], totals[i : i + 1])
        alone = cudnn.mla_prefill(q[at : at + lengths[i]], one, table[i : i + 1], pages, kv_b)
        MLA_PREFILL.equality.check(alone, got[at : at + lengths[i]])


@pytest.mark.parametrize("heads", [1, 3, 32])
def test_fetched_rows_are_those_of_the_pages(heads):
    """From the middle of a page to the middle of another; a page that follows is not read, a gap not written."""
    pages = torch.randn(5, PAGE, RANK + ROPE).to(torch.bfloat16)
    table = torch.tensor([3, 0, 4])
    latent, keys = torch.empty(2 * PAGE, RANK, dtype=pages.dtype), torch.empty(2 * PAGE, heads, NOPE + ROPE)
    keys = keys.to(pages.dtype)
    cudnn.fetch_rows(pages, table, 5, latent[: PAGE + 6], keys[: PAGE + 6, :, NOPE:])
    rows = torch.cat([pages[3], pages[0]])[5 : 5 + PAGE + 6]
    assert torch.equal(latent[: len(rows)], rows[:, :RANK])
    assert torch.equal(keys[: len(rows), :, NOPE:], rows[:, None, RANK:].expand(-1, heads, -1))
    assert latent[len(rows) :].isnan().all()
    assert keys[len(rows) :].isnan().all()
    assert keys[..., :NOPE].isnan().all()


def test_merge_of_far_apart_sums_is_the_larger_part():
    a, b = torch.randn(5, 3, 20), torch.randn(5, 3, 20)
    low, high = torch.full((3, 5), -1e4), torch.full((3, 5), 90.0)
    y, sums = cudnn.merge(a, low, b, high, torch.float32)
    assert torch.equal(y, b)
    assert torch.equal(sums, high)
    y, sums = cudnn.merge(a.bfloat16(), high, b, high, torch.bfloat16)
    torch.testing.assert_close(y, ((a.bfloat16().float() + b) / 2).bfloat16(), rtol=8e-3, atol=1e-6)
    torch.testing.assert_close(sums, high + torch.log(torch.tensor(2.0)))
