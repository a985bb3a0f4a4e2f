"""FFN-side kernels in Triton's interpreter, at odd shapes, against the reference in each operation's declared class.

Products of small integers are exact in any order, so a row alone and the row in its batch can be compared by bits even
where the interpreter's own matrix product has no fixed order.
"""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from helpers.banks import PlainBank, mxfp4_bank, plain_bank, random_routing
from helpers.moe import MOE, SILU, SITU, strided

from anabranch.config.model import ActivationConfig
from anabranch.ops.attn_residual import reference as residual_reference
from anabranch.ops.attn_residual import triton as residual
from anabranch.ops.attn_residual.spec import RESIDUAL_NORM
from anabranch.ops.experts import reference as experts_reference
from anabranch.ops.experts import tiles
from anabranch.ops.experts import triton as experts_kernels
from anabranch.ops.experts.spec import EXPERTS
from anabranch.ops.gate import reference as gate_reference
from anabranch.ops.gate import triton as gate
from anabranch.ops.gate.spec import GATE
from anabranch.ops.glu import reference as glu_reference
from anabranch.ops.glu import triton as glu
from anabranch.ops.glu.spec import GLU
from anabranch.ops.linear import reference as linear_reference
from anabranch.ops.linear import triton as linear
from anabranch.ops.linear.spec import BATCHED_LINEAR, LINEAR
from anabranch.ops.log_softmax import reference as log_softmax_reference
from anabranch.ops.log_softmax import triton as log_softmax
from anabranch.ops.log_softmax.spec import LOG_SOFTMAX, PICK
from anabranch.ops.mxfp4.reference import dequantize
from anabranch.ops.mxfp4.triton import mxfp4_tile
from anabranch.ops.norm import reference as norm_reference
from anabranch.ops.norm import triton as norm
from anabranch.ops.norm.spec import GATED_RMS_NORM, RMS_NORM
from anabranch.ops.router import reference as router_reference
from anabranch.ops.router import triton as router
from anabranch.ops.router.spec import ROUTER
from anabranch.ops.spec import tolerance

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def norm_weight(width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, width).to(dtype)


def residual_case(ops, x: torch.Tensor) -> torch.Tensor:
    bank, w = [x * 0.3, x.flip(1) * 2, x.roll(3, 1)], norm_weight(x.shape[1], x.dtype)
    return torch.cat(ops.residual_norm(x, x.flip(1), bank, w, w[None], w.flip(0), 1e-5), -1)


ROWWISE = {
    "rms_norm": (RMS_NORM, norm, norm_reference, lambda m, x: m.rms_norm(x, norm_weight(x.shape[1], x.dtype), 1e-5)),
    "l2_norm": (RMS_NORM, norm, norm_reference, lambda m, x: m.l2_norm(x[:, :93].unflatten(-1, (3, 31)))),
    "gated_rms_norm": (
        GATED_RMS_NORM,
        norm,
        norm_reference,
        lambda m, x: m.gated_rms_norm(x[:, :46].unflatten(-1, (2, 23)), x[:, 48:94], torch.linspace(0, 2, 23), 1e-5),
    ),
    "swiglu": (GLU, glu, glu_reference, lambda m, x: m.glu(x[:, :94], SILU)),
    "situ": (GLU, glu, glu_reference, lambda m, x: m.glu(x[:, :94] * 9, SITU)),
    "situ_uncapped": (
        GLU,
        glu,
        glu_reference,
        lambda m, x: m.glu(x[:, :94], ActivationConfig(name="situ", beta=2.0)),
    ),
    "residual_norm": (RESIDUAL_NORM, residual, residual_reference, residual_case),
}


@DTYPES
@pytest.mark.parametrize("name", ROWWISE)
def test_row_kernels_keep_their_class_and_do_not_know_their_neighbours(name, dtype):
    spec, kernels, reference, call = ROWWISE[name]
    x = strided(5, 95, dtype)
    got = call(kernels, x)
    spec.equality.check(got, call(reference, x))
    assert torch.equal(call(kernels, x[3:4]), got[3:4])


@DTYPES
def test_a_gated_norm_at_the_ends_of_its_gate(dtype):
    """(token, head) rows that fill no program; gates that close, open, and are no number."""
    ends = torch.tensor([-torch.inf, -200.0, -88.0, 0.0, 20.0, 200.0, torch.inf, torch.nan]).to(dtype)
    x, gate_row = strided(7, 40, dtype).unflatten(-1, (5, 8)), ends.repeat(7, 5)
    got = norm.gated_rms_norm(x, gate_row, torch.linspace(0.5, 2, 8), 1e-5)
    want = norm_reference.gated_rms_norm(x, gate_row, torch.linspace(0.5, 2, 8), 1e-5)
    assert torch.equal(got.isnan(), want.isnan())
    GATED_RMS_NORM.equality.check(got.nan_to_num(), want.nan_to_num())
    assert not got.unflatten(-1, (5, 8))[..., :2].any()


def test_gate_is_bitwise_in_bf16():
    x, g = torch.randn(5, 37).bfloat16(), strided(5, 37, torch.bfloat16, 4)
    GATE.equality.check(gate.sigmoid_gate(x, g), gate_reference.sigmoid_gate(x, g))


def test_gate_in_fp32():
    """The interpreter's exp is numpy's: bits are for the GPU test."""
    x, g = torch.randn(5, 37), strided(5, 37, torch.float32, 4)
    tolerance(3e-7, 0).check(gate.sigmoid_gate(x, g), gate_reference.sigmoid_gate(x, g))


@DTYPES
def test_add_rms_norm_norms_the_rounded_sum(dtype):
    x, update, weight = strided(4, 70, dtype), torch.randn(4, 70).to(dtype), norm_weight(70, dtype)
    total, normed = norm.add_rms_norm(x, update, weight, 1e-5)
    assert torch.equal(total, x + update)
    RMS_NORM.equality.check(normed, norm_reference.rms_norm(x + update, weight, 1e-5))
    assert torch.equal(normed, norm.rms_norm(total, weight, 1e-5))


def test_rms_norm_rounds_before_the_weight():
    """1.0026 rounds to 1 in bf16; times the weight without that rounding it would reach 2."""
    x, weight = torch.tensor([[1.0, 1.0, 0.9921875]]).bfloat16(), torch.full((3,), 1.9921875).bfloat16()
    assert norm.rms_norm(x, weight, 0.0)[0, 0].item() == 1.9921875


def test_log_softmax_over_several_chunks():
    logits = torch.randn(3, 9001) * 5
    logits[0, :5000] = -torch.inf  # a whole chunk without a finite value
    got = log_softmax.log_softmax(logits)
    want = log_softmax_reference.log_softmax(logits)
    assert got[0, :5000].isneginf().all()
    LOG_SOFTMAX.equality.check(got[0, 5000:], want[0, 5000:])
    LOG_SOFTMAX.equality.check(got[1:], want[1:])
    assert torch.equal(log_softmax.log_softmax(logits[1:2]), got[1:2])


def test_narrow_logits_are_widened_before_anything_else():
    logits = (torch.randn(3, 4500) * 5).bfloat16()
    logits[1, 4400] = torch.inf
    for module in (log_softmax, log_softmax_reference):
        for got, want in zip(module.pick(logits), module.pick(logits.float()), strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
        assert torch.equal(module.log_softmax(logits[::2]), module.log_softmax(logits[::2].float()))


def test_pick_over_several_chunks():
    logits = torch.randn(6, 9001) * 5
    logits[0, [8500, 4500, 20]] = 40.0  # a tie across chunks: the lowest index
    logits[1, 9000] = 50.0
    logits[2, 7] = torch.nan
    logits[3, 8999] = torch.inf
    logits[4, 3] = -torch.inf
    tokens, logprobs = log_softmax.pick(logits)
    want_tokens, want = log_softmax_reference.pick(logits)
    assert logprobs.isnan().tolist() == want.isnan().tolist() == [False, False, True, True, True, False]
    good = [0, 1, 5]
    assert tokens[good].tolist() == want_tokens[good].tolist()
    assert tokens[:2].tolist() == [20, 9000]
    assert ((tokens >= 0) & (tokens < 9001)).all()
    PICK.equality.check(logprobs[good], want[good])
    scores = log_softmax.log_softmax(logits[good])
    assert torch.equal(logprobs[good], scores.gather(1, tokens[good, None])[:, 0])
    wide = torch.full((2, 9100), 99.0)  # what lies beyond the row is not looked at
    wide[:, :9001] = logits[[5, 1]]
    alone = log_softmax.pick(wide[:, :9001])
    assert torch.equal(alone[0], tokens[[5, 1]])
    assert torch.equal(alone[1], logprobs[[5, 1]])


@DTYPES
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 70, 33), (17, 9, 140), (70, 130, 64)])
def test_linear(dtype, tokens, rows, columns):
    x, w = strided(tokens, columns, dtype), strided(rows, columns, dtype)
    LINEAR.equality.check(linear.linear(x, w), linear_reference.linear(x, w))


@DTYPES
def test_batched_linear(dtype):
    x, w = strided(8, 3 * 40, dtype).unflatten(-1, (3, 40)).transpose(0, 1), torch.randn(3, 9, 40).to(dtype)
    BATCHED_LINEAR.equality.check(linear.batched_linear(x, w), linear_reference.batched_linear(x, w))


@DTYPES
def test_exact_products_of_a_row_alone_and_of_a_merged_weight(dtype):
    x, w = torch.randint(-3, 4, (21, 50)).to(dtype), torch.randint(-3, 4, (75, 50)).to(dtype)
    whole = linear.linear(x, w)
    assert torch.equal(whole.double(), (x.double() @ w.double().T).to(dtype).double())
    assert torch.equal(linear.linear(x[20:], w), whole[20:])
    assert torch.equal(linear.linear(x, w[70:]), whole[:, 70:])


@DTYPES
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("tokens", [1, 19, 130])
def test_route(dtype, scoring, tokens):
    """130 tokens take the path where one program sums all segments."""
    x, weight, bias = strided(tokens, 300, dtype), (torch.randn(20, 300) * 0.1).to(dtype), torch.randn(20)
    moe = replace(MOE, scoring=scoring, renormalize=scoring == "sigmoid")
    weights, chosen = router.route(x, weight, bias, moe)
    want_weights, want_chosen = router_reference.route(x, weight, bias, moe)
    assert torch.equal(chosen, want_chosen)
    ROUTER.equality.check(weights, want_weights)


def test_the_lower_expert_wins_a_tie():
    weights, chosen = router.route(torch.ones(2, 16), torch.zeros(20, 16), torch.zeros(20), MOE)
    assert chosen.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights.sum(-1), torch.full((2,), 2.446))


def test_expert_groups_are_refused():
    with pytest.raises(ValueError, match="groups=2"):
        router.route(torch.ones(2, 16), torch.zeros(20, 16), torch.zeros(20), replace(MOE, groups=2))


@pytest.mark.parametrize("tail", [0, 4])
@pytest.mark.parametrize(("tokens", "one_program"), [(2, 4096), (50, 4096), (50, 8), (1100, 8)])
def test_every_local_pair_is_in_one_tile_of_its_expert(monkeypatch, tokens, one_program, tail):
    monkeypatch.setattr(tiles, "_ONE_PROGRAM", one_program)
    _, chosen = random_routing(tokens, 11, 3)
    chosen[: tokens // 2, 0], chosen[: tokens // 2, 1:] = 9, chosen[: tokens // 2, 1:] % 9  # one expert takes half
    made = tiles.align(chosen, 2, 8, 16, tail)
    seen, lasts = [], {}
    for expert, first, stop in made.table.T.tolist():
        if expert >= 0:
            assert 0 < stop - first <= 16 + tail
            assert lasts.get(expert, 16) == 16, "only the last tile of a run is not full"
            lasts[expert] = stop - first
            members = made.pairs[first:stop].long()
            assert (chosen.flatten()[members] == expert + 2).all()
            seen += members.tolist()
    local = ((chosen >= 2) & (chosen < 10)).flatten().nonzero().flatten().tolist()
    assert sorted(seen) == local
    assert not tail or all(size > tail or (made.table[0] == e).sum() == 1 for e, size in lasts.items())


def expert_case(dtype: torch.dtype, tokens: int, first: int = 0, count: int = 6, experts: int = 6):
    bank = plain_bank(count, 24, 40, dtype, first=first, spread=0.3)
    return torch.randn(tokens, 40).to(dtype), *random_routing(tokens, experts, 3), bank


@DTYPES
@pytest.mark.parametrize("activation", [SILU, SITU], ids=["silu", "situ"])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_experts(dtype, activation, tokens):
    x, weights, chosen, bank = expert_case(dtype, tokens)
    got = experts_kernels.routed_experts(x, weights, chosen, bank, activation)
    want = experts_reference.routed_experts(x, weights, chosen, bank, activation)
    assert got.dtype == torch.float32
    EXPERTS.equality.check(got.to(dtype), want.to(dtype))


@DTYPES
@pytest.mark.parametrize("tokens", [1, 9])
def test_other_ranks_experts_contribute_nothing(dtype, tokens):
    x, weights, chosen, bank = expert_case(dtype, tokens, first=4, count=3, experts=10)
    chosen[0] = torch.tensor([0, 1, 9])  # this token has no local expert at all
    got = experts_kernels.routed_experts(x, weights, chosen, bank, SILU)
    want = experts_reference.routed_experts(x, weights, chosen, bank, SILU)
    assert not got[0].any()
    EXPERTS.equality.check(got.to(dtype), want.to(dtype))


def test_more_tokens_than_one_tile_of_an_expert():
    x, weights, chosen, bank = expert_case(torch.bfloat16, 45, experts=3)
    got = experts_kernels.routed_experts(x, weights, chosen, bank, SILU)
    want = experts_reference.routed_experts(x, weights, chosen, bank, SILU)
    EXPERTS.equality.check(got.bfloat16(), want.bfloat16())


def test_exact_experts_of_a_token_alone():
    """Each expert multiplies by a signed permutation: every sum inside a GEMM has one term."""
    eye = torch.eye(32)
    w2 = torch.stack([eye.roll(e, 0) * (-1) ** e for e in range(6)])
    bank = PlainBank(first=0, count=6, w13=torch.cat([eye.expand(6, -1, -1), w2], 1).contiguous(), w2=w2)
    x, (weights, chosen) = torch.randn(23, 32), random_routing(23, 6, 3)
    whole = experts_kernels.routed_experts(x, weights, chosen, bank, SILU)
    for t in (0, 11, 22):
        alone = experts_kernels.routed_experts(x[t : t + 1], weights[t : t + 1], chosen[t : t + 1], bank, SILU)
        assert torch.equal(alone[0], whole[t])


@triton.jit
def _unpack(codes, scale, y, columns, R: tl.constexpr, K: tl.constexpr):
    row = tl.arange(0, R)
    for start in range(0, columns, K):
        tile = mxfp4_tile(codes, scale, row, start, columns, K, False, y.dtype.element_ty)
        c = (start + tl.arange(0, K))[None, :]
        tl.store(y + row[:, None] * columns + c, tile, mask=c < columns)


@DTYPES
def test_mxfp4_tiles_hold_every_code_under_every_scale(dtype):
    packed = torch.arange(256, dtype=torch.uint8).roll(5).expand(256, -1)[:, :48].contiguous()
    packed[:, 16:32] = torch.arange(16, dtype=torch.uint8) * 17
    scale, y = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 3), torch.empty(256, 96, dtype=dtype)
    _unpack[(1,)](packed, scale, y, 96, R=256, K=64)
    want = dequantize(packed, scale, dtype)
    assert torch.equal(y.isnan(), want.isnan())
    assert torch.equal(y.nan_to_num(), want.nan_to_num())


@DTYPES
@pytest.mark.parametrize("tokens", [1, 9])
def test_mxfp4_experts(dtype, tokens):
    bank = mxfp4_bank(5, 32, 96, dtype)
    bank.w13_scale[0, 0, 0] = 0  # the subnormal scale
    x, (weights, chosen) = torch.randn(tokens, 96).to(dtype), random_routing(tokens, 5, 2)
    got = experts_kernels.routed_experts(x, weights, chosen, bank, SITU)
    want = experts_reference.routed_experts(x, weights, chosen, bank, SITU)
    EXPERTS.equality.check(got.to(dtype), want.to(dtype))


def test_nothing_to_do():
    _, _, _, bank = expert_case(torch.float32, 1)
    none = torch.empty(0, 3)
    assert experts_kernels.routed_experts(torch.empty(0, 40), none, none.long(), bank, SILU).shape == (0, 40)
    assert linear.linear(torch.empty(0, 40), torch.ones(5, 40)).shape == (0, 5)
    assert norm.rms_norm(torch.empty(0, 40), torch.ones(40), 1e-5).shape == (0, 40)
    assert router.route(torch.empty(0, 16), torch.zeros(20, 16), torch.zeros(20), MOE)[0].shape == (0, 3)
