"""Deterministic implementations: the same bits alone, in a batch, in any split and at any place in it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.config.model import ActivationConfig
from anabranch.ops.arithmetic import fold_sum, sigmoid, silu, softplus
from anabranch.ops.attn_residual.deterministic import residual_norm
from anabranch.ops.conv.reference import conv
from anabranch.ops.experts.deterministic import routed_experts
from anabranch.ops.glu.deterministic import glu
from anabranch.ops.kda_decode.deterministic import kda_decode
from anabranch.ops.kda_prefill.deterministic import kda_prefill
from anabranch.ops.kda_prefill.spec import KDA_PREFILL
from anabranch.ops.linear import deterministic as linear_ops
from anabranch.ops.linear.spec import LINEAR
from anabranch.ops.log_softmax.deterministic import log_softmax, pick
from anabranch.ops.mla import deterministic as mla_ops
from anabranch.ops.mla import reference as mla_reference
from anabranch.ops.mla.spec import MLA_PREFILL
from anabranch.ops.norm.deterministic import add_rms_norm, gated_rms_norm, l2_norm, rms_norm
from anabranch.ops.segments import Segments

ROWWISE = {
    "sigmoid": sigmoid,
    "silu": silu,
    "softplus": softplus,
    "fold_sum": lambda x: fold_sum(x)[:, None],
    "rms_norm": lambda x: rms_norm(x, torch.arange(1.0, x.shape[1] + 1), 1e-5),
    "add_rms_norm": lambda x: torch.cat(add_rms_norm(x, x.flip(1), torch.arange(1.0, x.shape[1] + 1), 1e-5), -1),
    "mla_write": lambda x: written(x),
    "l2_norm": l2_norm,
    "gated_rms_norm": lambda x: gated_rms_norm(x[:, :12].unflatten(-1, (2, 6)), x[:, 12:24], torch.ones(6), 1e-5),
    "glu": lambda x: glu(x[:, :24], ActivationConfig(name="silu")),
    "situ": lambda x: glu(x[:, :24], ActivationConfig(name="situ", beta=4.0, linear_beta=25.0)),
    "log_softmax": log_softmax,
    "pick": lambda x: torch.stack([part.double() for part in pick(x.float())], -1),
    "linear": lambda x: linear_ops.linear(x, W),
    "residual_norm": lambda x: torch.cat(
        residual_norm(x, x.flip(1), [x * 0.3, x], torch.ones(x.shape[1]), x.new_ones(1, 1), x.new_ones(()), 1e-5), -1
    ),
}


def written(kv: torch.Tensor) -> torch.Tensor:
    """The cache rows of these tokens."""
    pages = kv.new_zeros(1, len(kv), kv.shape[1])
    mla_ops.mla_write(kv, torch.arange(1.0, 22.0).to(kv.dtype), 1e-5, torch.arange(len(kv)), pages)
    return pages[0]


torch.manual_seed(0)
W = torch.randn(9, 29)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROWWISE)
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 40), seed=st.integers(0, 1000), data=st.data())
def test_a_row_does_not_know_its_neighbours(name, dtype, rows, seed, data):
    torch.manual_seed(seed)
    x = torch.randn(rows, 29).mul(4).to(dtype)
    if name == "log_softmax":
        x = x.float()
    whole = ROWWISE[name](x if name != "linear" else x.float())
    first = data.draw(st.integers(0, rows - 1))
    count = data.draw(st.integers(1, rows - first))
    wide = torch.randn(count, 64).to(x.dtype)
    wide[:, 5:34] = x[first : first + count]  # the same rows, strided and at another alignment
    part = ROWWISE[name](wide[:, 5:34] if name != "linear" else wide[:, 5:34].float())
    assert torch.equal(part, whole[first : first + count])


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 50), k=st.integers(1, 70), data=st.data())
def test_a_merged_gemm_equals_the_separate_ones_bit_for_bit(n, k, data):
    x, w = torch.randn(3, k), torch.randn(n, k)
    cut = data.draw(st.integers(0, n))
    merged = linear_ops.linear(x, w)
    assert torch.equal(merged[:, :cut], linear_ops.linear(x, w[:cut]))
    assert torch.equal(merged[:, cut:], linear_ops.linear(x, w[cut:]))
    LINEAR.equality.check(merged, (x.double() @ w.double().T).float())


def test_gemm_blocks_do_not_show(monkeypatch):
    x, w = torch.randn(17, 33), torch.randn(6, 33)
    whole = linear_ops.linear(x, w)
    monkeypatch.setattr(linear_ops, "PRODUCTS", 1)
    assert torch.equal(linear_ops.linear(x, w), whole)


H, D = 2, 8


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(1, 9), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_kda_prefill_of_any_split_equals_decode_steps_bit_for_bit(cuts, seed):
    torch.manual_seed(seed)
    n = sum(cuts)
    x = (l2_norm(torch.randn(n, H, D)), l2_norm(torch.randn(n, H, D)), torch.randn(n, H, D))
    x = (*x, -torch.rand(n, H, D), torch.rand(n, H))
    steps, split = torch.zeros(2, H, D, D), torch.zeros(2, H, D, D)
    want = torch.cat([kda_decode(*(t[i : i + 1] for t in x), torch.tensor([1]), steps) for i in range(n)])
    got, at = [], 0
    other = (torch.randn(5, H, D), torch.randn(5, H, D), torch.randn(5, H, D), -torch.rand(5, H, D), torch.rand(5, H))
    for count in cuts:
        # every segment shares its batch with another sequence
        both = [torch.cat([o, t[at : at + count]]) for o, t in zip(other, x, strict=True)]
        got.append(kda_prefill(*both, Segments.of([5, count]), torch.tensor([0, 1]), split)[5:])
        at += count
    assert torch.equal(torch.cat(got), want)
    assert torch.equal(split[1], steps[1])


def test_kda_prefill_is_the_same_map_as_the_chunk_form():
    from anabranch.ops.kda_prefill.reference import kda_prefill as chunked

    torch.manual_seed(3)
    x = (l2_norm(torch.randn(70, H, D)), l2_norm(torch.randn(70, H, D)), torch.randn(70, H, D))
    x = (*x, -torch.rand(70, H, D), torch.rand(70, H))
    a, b = torch.randn(1, H, D, D), torch.zeros(1, H, D, D)
    b.copy_(a)
    KDA_PREFILL.equality.check(
        kda_prefill(*x, Segments.of([70]), torch.tensor([0]), a),
        chunked(*x, Segments.of([70]), torch.tensor([0]), b),
        "o",
    )
    KDA_PREFILL.equality.check(a, b, "state")


NOPE, ROPE, V, RANK, PAGE = 6, 2, 5, 8, 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_attention_does_not_know_how_a_prompt_was_cut(dtype, monkeypatch):
    torch.manual_seed(1)
    n = 150
    pages = torch.randn(12, PAGE, RANK + ROPE).to(dtype)
    kv_b, q = torch.randn(3, NOPE + V, RANK).to(dtype), torch.randn(n, 3, NOPE + ROPE).to(dtype)
    table = torch.randperm(12)[None]
    whole = mla_ops.mla_prefill(q, Segments.of([n]), table, pages, kv_b)
    reference = mla_reference.mla_prefill(q, Segments.of([n]), table, pages, kv_b)
    MLA_PREFILL.equality.check(whole, reference)
    monkeypatch.setattr(mla_ops, "PRODUCTS", 1)
    for cuts in ([1, 63, 64, 22], [64, 64, 22], [100, 50], [149, 1]):
        at, parts = 0, []
        for count in cuts:
            part = q[at : at + count]
            at += count
            parts.append(mla_ops.mla_prefill(part, Segments.of([count], [at]), table, pages, kv_b))
        assert torch.equal(torch.cat(parts), whole), cuts
    singles = [
        mla_ops.mla_decode(q[i : i + 1], torch.tensor([i + 1]), table, pages, kv_b) for i in (0, 1, 63, 64, 65, 149)
    ]
    assert torch.equal(torch.cat(singles), whole[[0, 1, 63, 64, 65, 149]])
    batch = mla_ops.mla_decode(q[[3, 0, 149]], torch.tensor([4, 0, 150]), table.expand(3, -1), pages, kv_b)
    assert torch.equal(batch[[0, 2]], whole[[3, 149]])
    assert not batch[1].any()


class Bank:
    """Experts 1 and 2 of four."""

    first, count = 1, 2

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.w13, self.w2 = torch.randn(2, 10, 7), torch.randn(2, 7, 5)

    def gate_up(self, expert: int) -> torch.Tensor:
        return self.w13[expert]

    def down(self, expert: int) -> torch.Tensor:
        return self.w2[expert]


def test_a_tokens_experts_do_not_know_the_batch_and_are_summed_in_ascending_order():
    bank, silu_glu = Bank(), ActivationConfig(name="silu")
    x, weights = torch.randn(9, 7), torch.rand(9, 3)
    experts = torch.stack([torch.randperm(4)[:3] for _ in range(9)])
    y = routed_experts(x, weights, experts, bank, silu_glu)
    for t in range(9):
        one, want = x[t : t + 1], torch.zeros(1, 7)
        assert torch.equal(routed_experts(one, weights[t : t + 1], experts[t : t + 1], bank, silu_glu), y[t : t + 1])
        for expert in (1, 2):
            for weight in weights[t][experts[t] == expert]:
                hidden = glu(linear_ops.linear(one, bank.gate_up(expert - 1)), silu_glu)
                want = want + linear_ops.linear(hidden, bank.down(expert - 1)) * weight
        assert torch.equal(y[t : t + 1], want)
    assert not routed_experts(x, weights, torch.zeros_like(experts), bank, silu_glu).any()
    assert routed_experts(x[:0], weights[:0], experts[:0], bank, silu_glu).shape == (0, 7)


def test_conv_is_elementwise():
    torch.manual_seed(2)
    u, w = torch.randn(20, 10), torch.randn(10, 4)
    whole = conv(u, Segments.of([20]), torch.tensor([0]), torch.zeros(1, 3, 10), w)
    pool = torch.zeros(2, 3, 10)
    parts = [
        conv(torch.cat([u[i : i + 1] * 2, u[i : i + 1]]), Segments.of([1, 1]), torch.tensor([0, 1]), pool, w)[1:]
        for i in range(20)
    ]
    assert torch.equal(torch.cat(parts), whole)
