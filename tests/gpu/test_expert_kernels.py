"""The experts' common launches and the one-launch router on a GPU: the bits of the chain, whatever the plan, in graphs.

Poisoned memory comes from the suite's own fixture; inside a capture the poison is part of the graph.
"""

from dataclasses import replace

import pytest
import torch
from helpers.banks import PlainBank, mxfp4_bank, plain_bank, random_routing
from helpers.moe import SILU, SITU

from anabranch.ops.expert_ffn.triton import expert_ffn
from anabranch.ops.expert_sum import reference as sum_reference
from anabranch.ops.expert_sum.triton import expert_sum
from anabranch.ops.experts.plan import Plan, Tile
from anabranch.ops.experts.triton import routed_experts
from anabranch.ops.glu.triton import glu
from anabranch.ops.linear import triton as segmented
from anabranch.ops.linear.skinny import linear
from anabranch.ops.router import triton as router_kernels
from anabranch.ops.router.triton import route
from anabranch.ops.spec import BITWISE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
TOKENS = (1, 2, 16, 17, 64)  # a launch less, few, and sorted


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, spread: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * spread).to(dtype)


@pytest.fixture(scope="module")
def kl_bank() -> PlainBank:
    return plain_bank(256, 1024, 2304, torch.bfloat16, device="cuda")


@pytest.fixture(scope="module")
def shared() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return randn(2048, 2304, spread=0.02), randn(2304, 1024, spread=0.02)


def chain(x, weights, chosen, bank, activation, shared, product, latent=None) -> torch.Tensor:
    routed = routed_experts(x if latent is None else latent, weights, chosen, bank, activation).to(x.dtype)
    own = product(glu(product(x, shared[0]), activation), shared[1])
    return routed + own if latent is None else torch.cat([routed, own], -1)


@pytest.mark.parametrize("tokens", [*TOKENS, 300])
def test_common_launches_have_the_bits_of_the_chain(kl_bank, shared, tokens):
    """Against the few-token kernel as against the Triton product: both sum K in the same segments."""
    x, (weights, chosen) = randn(tokens, 2304), random_routing(tokens, 256, 8, "cuda")
    inputs = (x, weights, chosen, kl_bank, SILU, shared)
    got = expert_ffn(*inputs, segmented.linear)
    BITWISE.check(got, chain(*inputs, segmented.linear), "Triton product")
    got = expert_ffn(*inputs, linear)
    BITWISE.check(got, chain(*inputs, linear), "model's product")
    if tokens <= 64:
        alone = (x[-1:], weights[-1:], chosen[-1:], kl_bank, SILU, shared)
        BITWISE.check(expert_ffn(*alone, linear), got[-1:], "last token alone")


HALF, TALL = Tile(T=16, R=32, K=128), Tile(T=16, R=128, K=64)
WIDER = Tile(T=64, R=64, K=64)


@pytest.mark.parametrize(
    ("tokens", "plan"),
    [
        (1, Plan(wide=HALF, narrow=TALL)),
        (16, Plan(wide=TALL, narrow=replace(HALF, R=64), few=0)),
        (40, Plan(wide=WIDER, narrow=WIDER, few=64)),
    ],
)
def test_no_plan_changes_a_bit(kl_bank, shared, tokens, plan):
    x, (weights, chosen) = randn(tokens, 2304), random_routing(tokens, 256, 8, "cuda")
    inputs = (x, weights, chosen, kl_bank, SILU, shared)
    BITWISE.check(expert_ffn(*inputs, linear, plan=plan), chain(*inputs, linear))


@pytest.mark.parametrize("T", [128, 256])
def test_runs_of_any_length_have_the_same_bits(kl_bank, T):
    """Experts with none, one, about a tile, about a tile and its tail, and several tiles of pairs."""
    runs = [n for m in range(4) for n in (m * T, m * T + 1, m * T + 32, m * T + 33)]
    chosen = torch.cat([torch.full((n,), 3 * e, device="cuda") for e, n in enumerate(runs)])
    chosen = chosen[torch.randperm(len(chosen), device="cuda")][:, None]
    x, weights = randn(len(chosen), 2304), torch.rand(len(chosen), 1, device="cuda")
    want = routed_experts(x, weights, chosen, kl_bank, SILU)
    wide = Tile(T=T, R=16384 // T, K=64, num_warps=8, stacked=True)
    narrow = Tile(T=T, R=32768 // T, K=64, num_warps=8)
    plan = Plan(wide=wide, narrow=narrow, tail=32)
    BITWISE.check(routed_experts(x, weights, chosen, kl_bank, SILU, plan), want)


def test_a_rider_in_fp32(kl_bank):
    bank = plain_bank(8, 96, 160, torch.float32, device="cuda", spread=0.1)
    matrices = randn(2 * 48, 160, dtype=torch.float32, spread=0.1), randn(160, 48, dtype=torch.float32, spread=0.1)
    inputs = (randn(40, 160, dtype=torch.float32), *random_routing(40, 8, 3, "cuda"), bank, SILU, matrices)
    BITWISE.check(expert_ffn(*inputs, segmented.linear), chain(*inputs, segmented.linear))


@pytest.mark.parametrize("tokens", [4, 70])
def test_latent_mxfp4_experts_beside_a_wide_shared_one(tokens):
    bank = mxfp4_bank(112, 384, 3584, torch.bfloat16, device="cuda")
    matrices = randn(2 * 768, 7168, spread=0.02), randn(7168, 768, spread=0.02)
    x, z = randn(tokens, 7168), randn(tokens, 3584, spread=0.1)
    inputs = (x, *random_routing(tokens, 112, 16, "cuda"), bank, SITU, matrices)
    BITWISE.check(expert_ffn(*inputs, linear, latent=z), chain(*inputs, linear, latent=z))


@pytest.mark.parametrize("first", [0, 192])
def test_other_ranks_experts_are_left_out(kl_bank, shared, first):
    span = slice(first, first + 64)
    part = PlainBank(first=first, count=64, w13=kl_bank.w13[span], w2=kl_bank.w2[span])
    for tokens in (1, 4, 17):
        inputs = (randn(tokens, 2304), *random_routing(tokens, 256, 8, "cuda"), part, SILU, shared)
        BITWISE.check(expert_ffn(*inputs, linear), chain(*inputs, linear), f"{tokens} tokens")


@pytest.mark.parametrize("tokens", [1, 5, 300, 1025])
def test_expert_sum_is_bitwise(tokens):
    out, (weights, chosen) = randn(tokens * 8, 2304), random_routing(tokens, 256, 8, "cuda")
    out[((chosen < 64) | (chosen >= 200)).flatten()] = torch.nan
    for shared in (None, randn(tokens, 5000)[:, 100:2404]):
        got, want = (torch.empty(tokens, 2304, device="cuda").bfloat16() for _ in range(2))
        expert_sum(out, weights, chosen, 64, 136, got, shared)
        sum_reference.expert_sum(out, weights, chosen, 64, 136, want, shared)
        BITWISE.check(got, want)


@pytest.mark.parametrize("config", ["real_kl", "real_k3"])
def test_one_launch_routes_as_two_do(request, monkeypatch, config):
    monkeypatch.setattr(router_kernels, "_SCORES", 4096)
    model = request.getfixturevalue(config)
    moe, width = model.moe, model.hidden_size
    weight, bias = randn(moe.experts, width, spread=0.02), torch.rand(moe.experts, device="cuda") * 0.1
    sync = torch.zeros(1, dtype=torch.int32, device="cuda")
    for tokens in (1, 2, 4, 16):
        for _ in range(20):
            x = randn(tokens, width)
            one, two = route(x, weight, bias, moe, sync), route(x, weight, bias, moe)
            BITWISE.check(one[1], two[1], f"experts of {tokens} tokens")
            BITWISE.check(one[0], two[0], f"weights of {tokens} tokens")
    assert sync.item() == 0


@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_a_chain_of_layers_replays(real_kl, kl_bank, shared, tokens):
    """Router and experts of 12 layers in one graph, each layer's result the next one's stream: early starts must not
    let a layer read what the one before has not written."""
    weight, bias = randn(256, 2304, spread=0.02), torch.zeros(256, device="cuda")
    sync = torch.zeros(1, dtype=torch.int32, device="cuda")

    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            weights, chosen = route(x, weight, bias, real_kl.moe, sync)
            x = x + expert_ffn(x, weights, chosen, kl_bank, SILU, shared, linear)
        return x

    x = randn(tokens, 2304)
    want = x.clone()
    for _ in range(12):
        weights, chosen = route(want, weight, bias, real_kl.moe)
        torch.cuda.synchronize()
        want = want + chain(want, weights, chosen, kl_bank, SILU, shared, linear)
        torch.cuda.synchronize()
    BITWISE.check(run(x), want, "eager")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x)
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        BITWISE.check(out, want, "replayed")
    x.copy_(randn(tokens, 2304))
    graph.replay()
    BITWISE.check(out, run(x), "other inputs")
    assert sync.item() == 0
