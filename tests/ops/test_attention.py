"""Latent attention: explicit against absorbed, against plain softmax attention; norms and the residual read."""

import pytest
import torch
import torch.nn.functional as F
from helpers import ref_tiny

from anabranch.ops.attn_residual.reference import residual_norm, residual_read
from anabranch.ops.attn_residual.spec import ATTN_RESIDUAL
from anabranch.ops.gate.reference import sigmoid_gate
from anabranch.ops.mla import deterministic
from anabranch.ops.mla import reference as mla
from anabranch.ops.mla.spec import MLA_PREFILL
from anabranch.ops.norm.reference import gated_rms_norm, rms_norm
from anabranch.ops.segments import Segments

H, NOPE, ROPE, V, RANK, PAGE = 3, 6, 2, 5, 8, 4


def setup(length: int, seed: int = 0):
    torch.manual_seed(seed)
    rows = torch.randn(length, RANK + ROPE)
    kv_b = torch.randn(H, NOPE + V, RANK)
    pages = torch.full((9, PAGE, RANK + ROPE), float("nan"))
    table = torch.tensor([7, 2, 5, 0, 8, 1])
    for position in range(length):
        pages[table[position // PAGE], position % PAGE] = rows[position]
    return rows, kv_b, pages, table


def plain(q: torch.Tensor, rows: torch.Tensor, kv_b: torch.Tensor) -> torch.Tensor:
    """torch's own attention over expanded keys and values; queries are the last positions."""
    keys = torch.cat(
        [torch.einsum("mr,hdr->hmd", rows[:, :RANK], kv_b[:, :NOPE]), rows[:, RANK:].expand(H, -1, -1)], -1
    )
    values = torch.einsum("mr,hdr->hmd", rows[:, :RANK], kv_b[:, NOPE:])
    n, m = q.shape[0], rows.shape[0]
    mask = torch.ones(n, m, dtype=torch.bool).tril(m - n)
    return F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, mask).transpose(0, 1).flatten(1)


@pytest.mark.parametrize(("context", "new"), [(0, 1), (0, 13), (1, 1), (7, 9), (20, 3), (3, 17)])
def test_explicit_and_absorbed_equal_plain_attention(context, new, monkeypatch):
    monkeypatch.setattr(mla, "QUERY_BLOCK", 4)  # several query blocks even at these lengths
    rows, kv_b, pages, table = setup(context + new)
    q = torch.randn(new, H, NOPE + ROPE)
    want = plain(q, rows, kv_b)
    got = mla.mla_prefill(q, Segments.of([new], [context + new]), table[None], pages, kv_b)
    MLA_PREFILL.equality.check(got, want)
    for i in range(new):
        absorbed = mla.mla_decode(q[i : i + 1], torch.tensor([context + i + 1]), table[None], pages, kv_b)
        torch.testing.assert_close(absorbed, want[i : i + 1], rtol=1e-4, atol=1e-5)


def test_decode_of_an_empty_slot_is_zero():
    _, kv_b, pages, table = setup(6)
    q = torch.randn(2, H, NOPE + ROPE)
    o = mla.mla_decode(q, torch.tensor([6, 0]), torch.stack([table, table * 0]), pages, kv_b)
    assert torch.equal(o[1], torch.zeros(H * V))
    assert o.isfinite().all()


@pytest.mark.parametrize("ops", [mla, deterministic])
def test_write_puts_normed_latents_and_raw_keys_where_the_rows_say(ops):
    kv, weight, pages = (
        torch.randn(3, RANK + ROPE + 2)[:, 1:-1],
        torch.rand(RANK),
        torch.full((4, PAGE, RANK + ROPE), 7.0),
    )
    ops.mla_write(kv, weight, 1e-5, torch.tensor([PAGE + 2, -1, 0]), pages)
    for i, (page, at) in ((0, (1, 2)), (2, (0, 0))):
        latent = kv[i, :RANK] * (kv[i, :RANK].square().mean() + 1e-5).rsqrt() * weight
        torch.testing.assert_close(pages[page, at], torch.cat([latent, kv[i, RANK:]]))
    pages[1, 2] = pages[0, 0] = 7.0
    assert (pages[:-1] == 7).all(), "nothing else is written but the page that nobody reads"


def test_step_is_the_chain_of_write_attention_and_gate():
    rows, kv_b, pages, table = setup(7)
    q, kv, weight, gate = (
        torch.randn(1, H, NOPE + ROPE),
        torch.randn(1, RANK + ROPE),
        torch.rand(RANK),
        torch.randn(1, H * V),
    )
    row = table[6 // PAGE] * PAGE + 6 % PAGE
    got = mla.mla_step(q, kv, weight, 1e-5, row[None], torch.tensor([7]), table[None], pages, kv_b, lambda: gate)
    rows[6] = torch.cat([rms_norm(kv[:, :RANK], weight, 1e-5)[0], kv[0, RANK:]])
    torch.testing.assert_close(got, plain(q, rows, kv_b) * torch.sigmoid(gate), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_norm_eps_counts_for_small_latents(eps):
    """Mean square 1e-6: the two public values of the MLA latent eps differ by more than a factor of 2 here."""
    x, w = torch.full((1, 512), 1e-3), torch.ones(512)
    torch.testing.assert_close(rms_norm(x, w, eps), torch.full_like(x, 1e-3 / (1e-6 + eps) ** 0.5))


def test_rms_norm_rounds_before_the_weight():
    x, w = torch.randn(4, 64).bfloat16(), torch.randn(64).bfloat16()
    x32 = x.float()
    normed = (x32 / (x32.square().mean(-1, keepdim=True) + 1e-5).sqrt()).bfloat16()
    assert torch.equal(rms_norm(x, w, 1e-5), normed * w)


def test_gated_norm_rounds_once_and_uses_sigmoid():
    x, gate, w = torch.randn(3, 2, 16).bfloat16(), torch.randn(3, 40).bfloat16()[:, :32], torch.randn(16)
    x64 = x.double()
    want = x64 / (x64.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
    want = want * torch.sigmoid(gate.reshape(3, 2, 16).double())
    torch.testing.assert_close(gated_rms_norm(x, gate, w, 1e-5), want.bfloat16().flatten(1), rtol=8e-3, atol=0)


def test_output_gate_rounds_twice():
    x, g = torch.randn(5, 64).bfloat16(), torch.randn(5, 96).bfloat16()[:, 32:]
    assert torch.equal(sigmoid_gate(x, g), (x.float() * torch.sigmoid(g.float()).bfloat16().float()).bfloat16())


def test_residual_read_equals_the_reference_and_passes_through_an_empty_bank():
    prefix, bank = torch.randn(5, 12), [torch.randn(5, 12) * s for s in (0.1, 30.0)]
    norm, score = torch.randn(12), torch.randn(1, 12)
    want = ref_tiny.attn_res(prefix, bank, norm, score, 1e-5)
    ATTN_RESIDUAL.equality.check(residual_read(prefix, bank, norm, score, 1e-5), want)
    assert residual_read(prefix, [], norm, score, 1e-5) is prefix


def test_residual_norm_is_the_sum_the_read_and_the_norm():
    prefix, update, bank = torch.randn(5, 12).bfloat16(), torch.randn(5, 12).bfloat16(), [torch.randn(5, 12).bfloat16()]
    weights = [torch.randn(12).bfloat16(), torch.randn(1, 12).bfloat16(), torch.randn(12).bfloat16()]
    for added in (update, None):
        want = prefix if added is None else prefix + added
        total, y = residual_norm(prefix, added, bank, *weights, 1e-5)
        assert torch.equal(total, want)
        assert torch.equal(y, rms_norm(residual_read(want, bank, *weights[:2], 1e-5), weights[2], 1e-5))


def test_residual_read_mixes_raw_rows():
    """One row far larger than the others: normed values would lose its size."""
    prefix, bank = torch.zeros(1, 4), [torch.full((1, 4), 100.0)]
    y = residual_read(prefix, bank, torch.ones(4), torch.full((1, 4), 50.0), 1e-5)
    torch.testing.assert_close(y, bank[0])
