"""One token's experts on a GPU: odd shapes, equal bits whatever the plan, early starts, graphs.

Poisoned memory comes from the suite's own fixture; inside a capture the poison is part of the graph.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.banks import PlainBank, plain_bank, random_routing
from helpers.moe import SILU, SITU

from anabranch.ops import native
from anabranch.ops.expert_ffn import cuda, gemv
from anabranch.ops.expert_ffn.plan import GemvPlan, choose_gemv
from anabranch.ops.expert_ffn.reference import expert_ffn as reference
from anabranch.ops.expert_ffn.spec import EXPERT_FFN
from anabranch.ops.expert_ffn.triton import expert_ffn as tiles
from anabranch.ops.linear.skinny import linear
from anabranch.ops.registry import select
from anabranch.ops.router.triton import route

if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0) or not native.verdict("expert_ffn").ok:
    pytest.skip("needs a Hopper GPU and built or buildable kernels", allow_module_level=True)

PLAN = GemvPlan()
PLANS = (
    replace(PLAN, warps=16),
    replace(PLAN, warps=4, down_warps=9, blocks=50),
    replace(PLAN, chained=False, warps=20, down_warps=28),
)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randn(*shape: int, spread: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * spread).bfloat16()


@pytest.fixture(scope="module")
def kl_bank() -> PlainBank:
    torch.manual_seed(2)
    return plain_bank(256, 1024, 2304, torch.bfloat16, device="cuda")


@pytest.fixture(scope="module")
def shared() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return randn(2048, 2304, spread=0.02), randn(2304, 1024, spread=0.02)


def run(given: tuple[Any, ...], plan: GemvPlan = PLAN) -> torch.Tensor:
    return gemv.expert_ffn(*given, plan=plan)


def check(given: tuple[Any, ...], plan: GemvPlan = PLAN) -> torch.Tensor:
    got = run(given, plan)
    EXPERT_FFN.equality.check(got, reference(*given, linear=torch.nn.functional.linear))
    return got


def test_kimi_linear_whatever_the_plan_and_run_after_run(kl_bank, shared):
    given: tuple[Any, ...] = (randn(1, 2304), *random_routing(1, 256, 8, "cuda"), kl_bank, SILU, shared)
    want = check(given)
    EXPERT_FFN.equality.check(want, tiles(*given, linear=linear), "against the tiles")
    for plan in (*PLANS, *[PLAN] * 10):
        assert torch.equal(run(given, plan), want), plan


@pytest.mark.parametrize(
    ("experts", "inner", "width", "top_k", "own"),
    [
        (64, 512, 2304, 8, 512),
        (64, 128, 2304, 8, 128),
        (16, 200, 1000, 3, 72),
        (9, 8, 40, 2, None),
        (24, 3072, 3584, 4, 48),
        (40, 40, 2312, 8, 1032),
    ],
)
def test_odd_shapes_and_shares_of_tp(experts, inner, width, top_k, own):
    bank = plain_bank(experts, inner, width, torch.bfloat16, device="cuda", spread=0.05)
    pair = None if own is None else (randn(2 * own, width, spread=0.05), randn(width, own, spread=0.05))
    x = torch.full((1, width + 16), torch.nan, device="cuda").bfloat16()
    x[:, 8 : 8 + width] = randn(1, width)
    for activation in (SILU, SITU, replace(SITU, linear_beta=None)):
        given = (x[:, 8 : 8 + width], *random_routing(1, experts, top_k, "cuda"), bank, activation, pair)
        want = check(given)
        assert torch.equal(run(given, PLANS[2]), want)


@pytest.mark.parametrize("first", [0, 192, 1000])
def test_other_ranks_experts_are_left_out(kl_bank, shared, first):
    """Of the last range nobody chose one: the shared expert alone, or zeros."""
    span = slice(first, first + 64) if first < 256 else slice(0, 64)
    part = PlainBank(first=first, count=64, w13=kl_bank.w13[span], w2=kl_bank.w2[span])
    given = (randn(1, 2304), *random_routing(1, 256, 8, "cuda"), part, SILU)
    check((*given, shared))
    got = check((*given, None))
    assert first < 256 or not got.any()


def test_replay_with_changed_routing(kl_bank, shared):
    x, (weights, chosen) = randn(1, 2304), random_routing(1, 256, 8, "cuda")
    given = (x, weights, chosen, kl_bank, SILU, shared)
    run(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(given)
    for step in range(8):
        x.copy_(randn(1, 2304))
        new = random_routing(1, 256 if step % 2 else 9, 8, "cuda")
        weights.copy_(new[0])
        chosen.copy_(new[1])
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, run(given, replace(PLAN, chained=False))), step
        EXPERT_FFN.equality.check(out, reference(*given, linear=torch.nn.functional.linear))


@pytest.mark.parametrize("plan", [PLAN, *PLANS[:2]])
def test_a_chain_of_layers_reads_nothing_too_early(real_kl, kl_bank, shared, monkeypatch, plan):
    """Router and experts of 12 layers, each layer's result the next one's stream, nothing between them; new inputs
    every time, so that what an early kernel might read is another layer's or another step's."""
    weight, bias = randn(256, 2304, spread=0.02), torch.zeros(256, device="cuda")
    sync = torch.zeros(1, dtype=torch.int32, device="cuda")

    def steps(x: torch.Tensor, plan: GemvPlan) -> torch.Tensor:
        for _ in range(12):
            y = run((x, *route(x, weight, bias, real_kl.moe, sync), kl_bank, SILU, shared), plan)
            x = torch.add(x, y, alpha=0.5)
        return x

    x = randn(1, 2304)
    steps(x, plan)
    plain: Any = torch._C
    for name in ("empty", "empty_like"):  # poisoning would be a launch in between
        monkeypatch.setattr(torch, name, getattr(plain._VariableFunctions, name))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = steps(x, plan)
    for _ in range(10):
        x.copy_(randn(1, 2304))
        graph.replay()
        got = out.clone()
        assert torch.equal(got, steps(x, replace(plan, chained=False)))
        assert got.isfinite().all()


def test_the_op_takes_one_token_and_leaves_the_rest_to_the_tiles(kl_bank, shared):
    for tokens in (1, 2, 9):
        given = (randn(tokens, 2304), *random_routing(tokens, 256, 8, "cuda"), kl_bank, SILU, shared)
        want = run(given, choose_gemv(1024) or PLAN) if tokens == 1 else tiles(*given, linear)
        assert torch.equal(cuda.expert_ffn(*given, linear), want), tokens


def test_the_model_chooses_it_and_k3_does_not(real_kl, real_k3):
    device = torch.device("cuda")
    assert select(real_kl, device).chosen["expert_ffn"] == ("cuda", "first that fits")
    assert select(real_kl, device, deterministic=True).chosen["expert_ffn"][0] == "triton"
    assert select(real_k3, device).chosen["expert_ffn"][0] == "triton"
