"""Router, activations, experts and MXFP4: what end-to-end tests of a normed latent MoE cannot see."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.config.model import ActivationConfig, MoeConfig
from anabranch.ops.experts.reference import routed_experts
from anabranch.ops.glu.reference import glu
from anabranch.ops.mxfp4.reference import dequantize, quantize
from anabranch.ops.router.reference import route

SITU = ActivationConfig(name="situ", beta=4.0, linear_beta=25.0)


def moe(**changes) -> MoeConfig:
    base = MoeConfig(
        experts=4,
        top_k=2,
        shared_experts=1,
        intermediate_size=8,
        groups=1,
        top_groups=1,
        scoring="sigmoid",
        renormalize=True,
        scaling=2.446,
        latent_size=None,
        latent_norm=False,
    )
    return replace(base, **changes)


LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


def test_bias_chooses_but_does_not_weigh():
    weight, bias = torch.eye(4), torch.tensor([0.0, 0.0, 0.0, 10.0])
    weights, experts = route(LOGITS, weight, bias, moe())
    assert set(experts[0].tolist()) == {0, 3}
    scores = torch.sigmoid(LOGITS[0, experts[0]])
    torch.testing.assert_close(weights[0], scores / scores.sum() * 2.446)


def test_scaling_and_renormalisation_apply_exactly_once():
    weight, bias = torch.eye(4), torch.zeros(4)
    weights, _ = route(LOGITS, weight, bias, moe())
    torch.testing.assert_close(weights.sum(), torch.tensor(2.446))
    weights, _ = route(LOGITS, weight, bias, moe(renormalize=False, scaling=1.0))
    torch.testing.assert_close(weights[0].sort().values, torch.sigmoid(LOGITS[0, :2]).sort().values)


def test_router_reads_bf16_inputs_in_fp32():
    """Two logits that differ by less than a bf16 step must still be told apart."""
    x = torch.tensor([[1.0, 2.0**-9]]).bfloat16()
    weight = torch.tensor([[8.0, 0.0], [8.0, 1.0]]).bfloat16()
    _, experts = route(x, weight, torch.zeros(2), moe(experts=2, top_k=1))
    assert experts.item() == 1


def test_groups_are_ranked_by_their_two_best():
    """Group 0 has the single best expert, group 1 the better pair."""
    logits = torch.tensor([[3.0, -9.0, 2.0, 2.0]])
    _, experts = route(logits, torch.eye(4), torch.zeros(4), moe(groups=2, top_groups=1))
    assert set(experts[0].tolist()) == {2, 3}


def test_softmax_scoring():
    weights, _ = route(LOGITS, torch.eye(4), torch.zeros(4), moe(scoring="softmax", renormalize=False, scaling=1.0))
    torch.testing.assert_close(weights[0], torch.softmax(LOGITS[0], -1)[:2])


def test_situ_caps_hold_up_to_100():
    gate = torch.tensor([-100.0, -4.0, -0.5, 0.0, 0.5, 4.0, 100.0])
    for up_value in (-100.0, -25.0, 1.0, 100.0):
        up = torch.full_like(gate, up_value)
        got = glu(torch.cat([gate, up])[None], SITU)[0]
        g, u = gate.double(), up.double()
        want = 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
        assert got.abs().max() <= 100.0


def test_situ_sigmoid_takes_the_uncapped_gate():
    """At gate 100 a capped sigmoid would give sigmoid(4) = 0.982 instead of 1."""
    got = glu(torch.tensor([[100.0, 25.0]]), SITU)
    torch.testing.assert_close(got, torch.tensor([[4 * 25 * 0.76159416]]), rtol=1e-6, atol=0)


def test_situ_without_linear_beta_does_not_cap_up():
    got = glu(torch.tensor([[100.0, 1000.0]]), ActivationConfig(name="situ", beta=4.0))
    torch.testing.assert_close(got, torch.tensor([[4000.0]]))


class Bank:
    def __init__(self, first: int, count: int) -> None:
        torch.manual_seed(3)
        self.w13, self.w2 = torch.randn(6, 10, 7), torch.randn(6, 7, 5)
        self.first, self.count, self.total = first, count, 6

    def gate_up(self, expert: int) -> torch.Tensor:
        return self.w13[self.first + expert]

    def down(self, expert: int) -> torch.Tensor:
        return self.w2[self.first + expert]


def test_experts_sum_over_local_ranges():
    torch.manual_seed(1)
    x, weights = torch.randn(9, 7), torch.rand(9, 2)
    experts = torch.stack([torch.randperm(6)[:2] for _ in range(9)])
    silu = ActivationConfig(name="silu")
    whole = routed_experts(x, weights, experts, Bank(0, 6), silu)
    want = torch.zeros(9, 7)
    bank = Bank(0, 6)
    for t in range(9):
        for w, e in zip(weights[t], experts[t].tolist(), strict=True):
            want[t] += w * (bank.w2[e] @ glu((bank.w13[e] @ x[t])[None], silu)[0])
    torch.testing.assert_close(whole, want, rtol=1e-4, atol=1e-4)
    parts = [routed_experts(x, weights, experts, Bank(first, 2), silu) for first in (0, 2, 4)]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-5)


def test_a_tokens_sum_does_not_depend_on_the_batch():
    torch.manual_seed(1)
    x, weights = torch.randn(9, 7), torch.rand(9, 2)
    experts = torch.stack([torch.randperm(6)[:2] for _ in range(9)])
    y = routed_experts(x, weights, experts, Bank(0, 6), ActivationConfig(name="silu"))
    alone = routed_experts(x[4:5], weights[4:5], experts[4:5], Bank(0, 6), ActivationConfig(name="silu"))
    torch.testing.assert_close(y[4:5], alone, rtol=1e-6, atol=1e-6)


def test_mxfp4_codes_nibble_order_and_scales():
    """Low nibble first; code 9 is -0.5; scale byte 130 is 8, byte 0 is 2^-127."""
    packed = torch.zeros(1, 32, dtype=torch.uint8)
    packed[0, 0], packed[0, 16] = 0x9F, 0x21
    scale = torch.tensor([[130, 0]], dtype=torch.uint8)
    w = dequantize(packed, scale, torch.float32)[0]
    assert w[:2].tolist() == [-48.0, -4.0]
    assert w[32:34].tolist() == [0.5 * 2.0**-127, 2.0**-127]
    assert not w[2:32].any()


def test_every_mxfp4_value_is_exact_in_bf16():
    packed = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    for scale in (0, 1, 90, 127, 200, 250):
        s = torch.full((16, 1), scale, dtype=torch.uint8)
        as_bf16, as_fp32 = dequantize(packed, s, torch.bfloat16), dequantize(packed, s, torch.float32)
        assert torch.equal(as_bf16.float(), as_fp32)


def test_mxfp4_scale_255_is_nan():
    w = dequantize(torch.zeros(1, 16, dtype=torch.uint8), torch.full((1, 1), 255, dtype=torch.uint8), torch.float32)
    assert w.isnan().all()


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), exponent=st.integers(-30, 30))
def test_mxfp4_quantize_is_nearest_and_a_projection(seed, exponent):
    torch.manual_seed(seed)
    w = torch.randn(3, 64) * 2.0**exponent
    packed, scale = quantize(w)
    back = dequantize(packed, scale, torch.float32)
    again = dequantize(*quantize(back), torch.float32)
    assert torch.equal(back, again)
    step = torch.exp2(scale.float() - 127).repeat_interleave(32, -1)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6.0])
    grid = torch.cat([-grid, grid])
    nearest = ((w / step)[..., None] - grid).abs().min(-1).values
    torch.testing.assert_close((w - back).abs() / step, nearest, rtol=1e-5, atol=1e-6)


def test_mxfp4_needs_whole_groups():
    with pytest.raises(ValueError, match="multiple of 32 columns, got 48"):
        quantize(torch.zeros(2, 48))
