"""The experts' common launches, their sum and the one-launch router in Triton's interpreter, at odd shapes.

Where every product has one term (signed permutations) all sums are exact, so that paths can be compared by bits.
"""

from dataclasses import replace

import pytest
import torch
from helpers.banks import PlainBank, mxfp4_bank, plain_bank, random_routing
from helpers.moe import MOE, SILU, SITU, strided

from anabranch.ops.expert_ffn import reference as ffn_reference
from anabranch.ops.expert_ffn import triton as ffn_kernels
from anabranch.ops.expert_ffn.spec import EXPERT_FFN
from anabranch.ops.expert_ffn.triton import expert_ffn
from anabranch.ops.expert_sum import reference as sum_reference
from anabranch.ops.expert_sum import triton as sum_kernels
from anabranch.ops.expert_sum.spec import EXPERT_SUM
from anabranch.ops.expert_sum.triton import expert_sum
from anabranch.ops.experts.plan import FEW, LONE, SORTED, Plan, Tile, choose_plan
from anabranch.ops.experts.triton import routed_experts
from anabranch.ops.glu.triton import glu
from anabranch.ops.linear import reference as linear_reference
from anabranch.ops.linear.triton import linear
from anabranch.ops.router import reference as router_reference
from anabranch.ops.router import triton as router_kernels
from anabranch.ops.router.plan import LogitTile, logit_tile
from anabranch.ops.router.spec import ROUTER
from anabranch.ops.router.triton import route

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SMALL = Tile(T=16, R=32, K=32, num_stages=2)
PLANS = {
    "sorted": Plan(wide=Tile(T=16, R=64, K=64), narrow=Tile(T=16, R=64, K=32), few=0),
    "few": Plan(wide=SMALL, narrow=Tile(T=16, R=64, K=64)),
    "many columns": Plan(wide=Tile(T=64, R=64, K=32), narrow=Tile(T=64, R=128, K=32), few=64),
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def permutations(count: int, width: int, dtype: torch.dtype) -> tuple[PlainBank, tuple[torch.Tensor, torch.Tensor]]:
    """A bank and a shared expert whose matrices have one entry, 1 or -1, a row."""
    eye = torch.eye(width)
    turned = torch.stack([eye.roll(e, 0) * (-1) ** e for e in range(count)])
    w13 = torch.cat([eye.expand(count, -1, -1), turned], 1).contiguous()
    bank = PlainBank(first=0, count=count, w13=w13.to(dtype), w2=turned.flip(0).contiguous().to(dtype))
    return bank, (torch.cat([eye.roll(3, 0), -eye.roll(5, 0)]).to(dtype), -eye.roll(2, 0).to(dtype))


def chain(x, weights, chosen, bank, activation, shared) -> torch.Tensor:
    """The same as one kernel after the other."""
    routed = routed_experts(x, weights, chosen, bank, activation, PLANS["sorted"])
    return routed.to(x.dtype) + linear(glu(linear(x, shared[0]), activation), shared[1])


@DTYPES
@pytest.mark.parametrize("tokens", [1, 5, 18])
def test_a_rider_has_the_bits_of_its_own_chain(dtype, tokens):
    bank, shared = permutations(6, 40, dtype)
    x, (weights, chosen) = torch.randn(tokens, 40).to(dtype), random_routing(tokens, 6, 3)
    for activation in (SILU, SITU):
        got = expert_ffn(x, weights, chosen, bank, activation, shared, linear)
        assert torch.equal(got, chain(x, weights, chosen, bank, activation, shared))
    for name, plan in PLANS.items() if dtype == torch.bfloat16 else ():
        assert torch.equal(expert_ffn(x, weights, chosen, bank, SITU, shared, linear, plan=plan), got), name


def test_a_rider_sums_in_four_segments():
    """Sums that lose their small terms in any other order: each segment holds 2^24, then ones."""
    x = torch.ones(1, 256)
    row = torch.ones(256)
    row[0], row[128] = 2.0**24, -(2.0**24)
    shared = torch.cat([row.expand(4, -1), torch.ones(4, 256)]).contiguous(), torch.eye(256, 4)
    bank = plain_bank(2, 8, 256, torch.float32, spread=0.0)
    _, (weights, chosen) = x, random_routing(1, 2, 1)
    got = expert_ffn(x, weights, chosen, bank, SILU, shared, linear)
    assert torch.equal(got, linear(glu(linear(x, shared[0]), SILU), shared[1]))


def routing_without(expert: int, tokens: int, experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random routing that leaves one expert out."""
    weights, chosen = random_routing(tokens, experts - 1, top_k)
    return weights, chosen + (chosen >= expert)


@DTYPES
@pytest.mark.parametrize(("tokens", "first", "count"), [(1, 0, 9), (5, 4, 3), (19, 2, 7)])
def test_expert_ffn_against_the_reference(monkeypatch, dtype, tokens, first, count):
    """With a rider and, at 19 tokens, without; other ranks' experts; one of NaN that nobody chose."""
    monkeypatch.setattr(ffn_kernels, "RIDER_TOKENS", 5)
    bank = plain_bank(count, 24, 40, dtype, first=first, spread=0.3)
    bank.w13[0], bank.w2[0] = torch.nan, torch.nan
    x, (weights, chosen) = torch.randn(tokens, 40).to(dtype), routing_without(first, tokens, 9, 3)
    shared = (torch.randn(2 * 72, 40) * 0.3).to(dtype), (torch.randn(40, 72) * 0.3).to(dtype)
    for part in (shared, None):
        inputs = (x, weights, chosen, bank, SITU, part)
        got = expert_ffn(*inputs, linear)
        want = ffn_reference.expert_ffn(*inputs, linear_reference.linear)
        EXPERT_FFN.equality.check(got, want)


@DTYPES
@pytest.mark.parametrize("tokens", [1, 7, 19])
def test_latent_experts_leave_two_sums_side_by_side(monkeypatch, dtype, tokens):
    monkeypatch.setattr(ffn_kernels, "RIDER_TOKENS", 7)
    bank, spread = mxfp4_bank(5, 32, 96, dtype), 0.3
    x, z = torch.randn(tokens, 40).to(dtype), torch.randn(tokens, 96).to(dtype)
    shared = (torch.randn(2 * 24, 40) * spread).to(dtype), (torch.randn(40, 24) * spread).to(dtype)
    for part in (shared, None):
        inputs = (x, *random_routing(tokens, 5, 2), bank, SITU, part)
        got = expert_ffn(*inputs, linear, latent=z)
        want = ffn_reference.expert_ffn(*inputs, linear_reference.linear, latent=z)
        assert got.shape == (tokens, 96 + 40)
        EXPERT_FFN.equality.check(got[:, :96], want[:, :96])
        EXPERT_FFN.equality.check(got[:, 96:], want[:, 96:])


def test_plans_find_pairs_in_three_ways():
    assert [PLANS["few"].mode(t) for t in (1, 2, 16, 17)] == [LONE, FEW, FEW, SORTED]
    assert PLANS["sorted"].mode(2) == SORTED
    assert choose_plan(16, 8, 256, torch.bfloat16).mode(16) == FEW
    assert choose_plan(4000, 8, 256, torch.bfloat16).mode(4000) == SORTED
    with pytest.raises(AssertionError, match="same tiles"):
        Plan(wide=SMALL, narrow=Tile(T=32, R=64, K=32))
    with pytest.raises(AssertionError, match="less than a tile"):
        Plan(wide=SMALL, narrow=SMALL, tail=16)
    with pytest.raises(AssertionError, match="in one product"):
        Plan(wide=Tile(T=32, R=64, K=32), narrow=Tile(T=32, R=64, K=32), tail=16)


RUNS = (0, 1, 16, 17, 33, 48, 49)  # pairs of each expert, about a tile of 32 with a tail of 16


def test_runs_of_any_length_have_the_same_bits():
    """Tiles with a tail and without; other ranks' pairs between; NaN where nobody wrote."""
    bank, _ = permutations(len(RUNS), 32, torch.bfloat16)
    chosen = torch.cat([torch.full((n,), e + 2) for e, n in enumerate(RUNS)] + [torch.tensor([0, 1, 9, 10])])
    chosen = chosen[torch.randperm(len(chosen))][:, None]
    bank.first, x, weights = 2, torch.randn(len(chosen), 32).bfloat16(), torch.ones(len(chosen), 1)
    want = routed_experts(x, weights, chosen, bank, SILU, PLANS["sorted"])
    assert want.isfinite().all()
    for R, tail in ((32, 16), (64, 16), (64, 0)):
        wide, narrow = Tile(T=32, R=R, K=32, stacked=True), Tile(T=32, R=64, K=32)
        plan = Plan(wide=wide, narrow=narrow, tail=tail)
        assert torch.equal(routed_experts(x, weights, chosen, bank, SILU, plan), want), plan


@DTYPES
@pytest.mark.parametrize("few", [1, 5])
@pytest.mark.parametrize("tokens", [1, 5])
def test_expert_sum_is_bitwise(monkeypatch, dtype, tokens, few):
    """By ascending expert; rows of other ranks' experts are never read; y keeps what is beside it."""
    monkeypatch.setattr(sum_kernels, "_FEW_TOKENS", few)
    monkeypatch.setattr(sum_kernels, "_COLUMNS", 256)
    out, (weights, chosen) = torch.randn(tokens * 5, 700).to(dtype), random_routing(tokens, 20, 5)
    out[((chosen < 3) | (chosen >= 15)).flatten()] = torch.nan
    for shared in (None, strided(tokens, 700, dtype)):
        wide = torch.full((tokens, 720), 7.0, dtype=dtype)
        want = torch.empty(tokens, 700, dtype=dtype)
        expert_sum(out, weights, chosen, 3, 12, wide[:, 20:], shared)
        sum_reference.expert_sum(out, weights, chosen, 3, 12, want, shared)
        EXPERT_SUM.equality.check(wide[:, 20:], want)
        assert (wide[:, :20] == 7).all()


def test_tiles_of_the_routers_logits(real_kl, real_k3):
    """By the programs that they make; splitting ends at 128 tokens."""
    sizes = [(config.moe.experts, config.hidden_size) for config in (real_kl, real_k3)]
    for tokens, want in {
        1: (16, 16), 128: (64, 64), 129: (32, 32), 288: (32, 32), 289: (32, 64), 1056: (32, 64), 1057: (64, 64),
        1664: (64, 64), 1665: (64, 128), 6016: (64, 128), 6017: (128, 128), 20_000: (128, 128),
    }.items():  # fmt: skip
        assert tuple(logit_tile(tokens, *size, 2).T for size in sizes) == want, tokens
    assert logit_tile(20_000, 256, 2304, 4).T == 16
    assert logit_tile(20_000, 256, 2300, 2).T == 64  # a large tile takes whole segments only


@DTYPES
def test_no_tile_of_logits_changes_a_bit(monkeypatch, dtype):
    """Exact sums (their order is tests/gpu's); tokens and experts that fill no tile; a row of NaN stays alone."""
    x, weight = torch.randint(-3, 4, (37, 512)).to(dtype), (torch.randint(-3, 4, (70, 512)) / 512).to(dtype)
    x[20] = torch.nan
    monkeypatch.setattr(router_kernels, "SPLIT_TOKENS", 16)
    bias, want = torch.randn(70), None
    moe = replace(MOE, experts=70, top_k=5)
    for tile in (LogitTile(T=64), LogitTile(T=32), LogitTile(T=64, R=128, K=64), LogitTile(T=16, R=32, K=32)):
        monkeypatch.setattr(router_kernels, "logit_tile", lambda *_, tile=tile: tile)
        weights, chosen = route(x, weight, bias, moe)
        want = want or (weights, chosen)
        assert torch.equal(chosen, want[1]), tile
        assert torch.equal(weights.isnan(), want[0].isnan()), tile
        assert torch.equal(weights.nan_to_num(), want[0].nan_to_num()), tile
    live = torch.arange(37) != 20
    want_weights, want_chosen = router_reference.route(x[live], weight, bias, moe)
    assert torch.equal(chosen[live], want_chosen)
    ROUTER.equality.check(weights[live], want_weights)


@DTYPES
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize(("tokens", "experts"), [(1, 20), (16, 20), (3, 300), (8, 300), (16, 300)])
def test_one_launch_routes_as_two_do(monkeypatch, dtype, scoring, tokens, experts):
    """16 tokens of 300 experts are too many scores for one program here: two launches."""
    monkeypatch.setattr(router_kernels, "_SCORES", 4096)
    x, weight = strided(tokens, 300, dtype), (torch.randn(experts, 300) * 0.1).to(dtype)
    bias, sync = torch.randn(experts), torch.zeros(1, dtype=torch.int32)
    moe = replace(MOE, experts=experts, top_k=5, scoring=scoring, renormalize=scoring == "sigmoid")
    route(x, weight, bias, moe, sync)
    assert sync.item() == 0
    weights, chosen = route(x, weight, bias, moe, sync)
    two_weights, two_chosen = route(x, weight, bias, moe)
    assert torch.equal(chosen, two_chosen)
    assert torch.equal(weights, two_weights)
    want_weights, want_chosen = router_reference.route(x, weight, bias, moe)
    assert torch.equal(chosen, want_chosen)
    ROUTER.equality.check(weights, want_weights)


@pytest.mark.parametrize("one_launch", [True, False])
def test_the_lower_expert_wins_a_tie_anywhere_in_a_row(monkeypatch, one_launch):
    """Equal scores on both sides of every stretch of 128, and one better expert far behind."""
    monkeypatch.setattr(router_kernels, "_SCORES", 4096)
    sync = torch.zeros(1, dtype=torch.int32) if one_launch else None
    bias = torch.zeros(300)
    bias[[5, 127, 128, 255, 256, 299]] = 1.0
    bias[290] = 2.0
    _, chosen = route(torch.ones(2, 16), torch.zeros(300, 16), bias, replace(MOE, experts=300, top_k=6), sync)
    assert chosen.tolist() == [[290, 5, 127, 128, 255, 256]] * 2


@pytest.mark.parametrize("one_launch", [True, False])
def test_a_row_of_nan_chooses_real_experts_and_leaves_its_neighbours_alone(one_launch):
    sync = torch.zeros(1, dtype=torch.int32) if one_launch else None
    x, weight = torch.randn(3, 64), torch.randn(140, 64)
    moe = replace(MOE, experts=140)
    want = route(x, weight, torch.zeros(140), moe, sync)
    x[1] = torch.nan
    weights, chosen = route(x, weight, torch.zeros(140), moe, sync)
    assert ((chosen >= 0) & (chosen < 140)).all()
    assert torch.equal(chosen[::2], want[1][::2])
    assert torch.equal(weights[::2], want[0][::2])
    assert chosen[1].unique().numel() == 3
