"""The streamed products of few pairs on a Hopper GPU: the bits of the Triton kernels, ranks, graphs, who takes them."""

import pytest
import torch
from helpers.banks import PlainBank, plain_bank, random_routing
from helpers.moe import SILU, SITU

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("tvm_ffi")

from anabranch.ops.experts import reference, stream
from anabranch.ops.experts import triton as kernels
from anabranch.ops.experts.plan import Plan, Tile
from anabranch.ops.experts.spec import EXPERTS
from anabranch.ops.spec import BITWISE

if not stream.available(0):
    pytest.skip("needs a Hopper GPU and built or buildable kernels", allow_module_level=True)

# no plan changes a bit, so one of them stands for all
PLAN = Plan(wide=Tile(T=16, R=64, K=64), narrow=Tile(T=16, R=64, K=64))
RUNS = [0, 1, 7, 8, 9, 15, 16, 17, 31, 0, 32, 33, 63, 64, 65, 127, 128, 129, 300]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def agree(x, chosen, bank, activation) -> None:
    """Every row of a local pair has the bits of the Triton kernel, no other row is written."""
    got = stream.expert_products(x, chosen, bank, activation)
    want = kernels.expert_products(x, chosen, bank, activation, PLAN)
    local = ((chosen >= bank.first) & (chosen < bank.first + bank.count)).flatten()
    assert want[local].isfinite().all()
    assert got[~local].isnan().all()
    BITWISE.check(got[local], want[local])


@pytest.mark.parametrize(("inner", "width", "activation"), [(1024, 2304, SILU), (72, 136, SITU), (184, 344, SILU)])
def test_runs_of_any_length(inner, width, activation):
    chosen = torch.cat([torch.full((n,), e, device="cuda") for e, n in enumerate(RUNS)])
    chosen = chosen[torch.randperm(len(chosen), device="cuda")][:, None]
    bank = plain_bank(len(RUNS), inner, width, torch.bfloat16, device="cuda", spread=0.05)
    x = torch.randn(len(chosen), width + 24, device="cuda").bfloat16()[:, 8 : 8 + width]
    agree(x, chosen, bank, activation)


@pytest.mark.parametrize("tokens", [2, 65, 128, 255, 511, 1024])
def test_steps_and_prompts_of_kimi_linear(tokens):
    bank = plain_bank(256, 1024, 2304, torch.bfloat16, device="cuda")
    x, (_, chosen) = torch.randn(tokens, 2304, device="cuda").bfloat16(), random_routing(tokens, 256, 8, "cuda")
    agree(x, chosen, bank, SILU)


def test_other_ranks_experts_are_left_out():
    whole = plain_bank(64, 256, 512, torch.bfloat16, device="cuda")
    part = PlainBank(first=16, count=32, w13=whole.w13[16:48], w2=whole.w2[16:48])
    x, (_, chosen) = torch.randn(90, 512, device="cuda").bfloat16(), random_routing(90, 64, 8, "cuda")
    agree(x, chosen, part, SILU)
    assert stream.expert_products(x, chosen % 16, part, SILU).isnan().all()


def test_a_token_of_nan_stays_alone():
    """Its rows lie in the tiles of others, and in the ring behind the ends of shorter tiles."""
    bank = plain_bank(24, 128, 264, torch.bfloat16, device="cuda", spread=0.05)
    x, (_, chosen) = torch.randn(101, 264, device="cuda").bfloat16(), random_routing(101, 24, 8, "cuda")
    want, poisoned = stream.expert_products(x, chosen, bank, SILU), torch.arange(0, 101, 5, device="cuda")
    x[poisoned] = torch.nan
    got = stream.expert_products(x, chosen, bank, SILU).view(101, 8, 264)
    assert got[poisoned].isnan().all()
    kept = torch.ones(101, dtype=torch.bool, device="cuda").index_fill_(0, poisoned, False)
    BITWISE.check(got[kept], want.view(101, 8, 264)[kept])


def test_a_graph_replays_with_other_inputs():
    bank = plain_bank(32, 256, 512, torch.bfloat16, device="cuda", spread=0.05)
    x, (_, chosen) = torch.randn(50, 512, device="cuda").bfloat16(), random_routing(50, 32, 8, "cuda")
    stream.expert_products(x, chosen, bank, SILU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = stream.expert_products(x, chosen, bank, SILU)
    for _ in range(5):
        x.copy_(torch.randn(50, 512, device="cuda"))
        chosen.copy_(random_routing(50, 32, 8, "cuda")[1])
        out.fill_(torch.nan)
        graph.replay()
        BITWISE.check(out, kernels.expert_products(x, chosen, bank, SILU, PLAN))


@pytest.mark.parametrize("tokens", [70, 150])
def test_many_layers_behind_each_other(unpoisoned, tokens):
    """Nothing between launches: the sort, both products and the next sort take their places early."""
    banks = [plain_bank(128, 128, 512, torch.bfloat16, device="cuda", spread=0.05) for _ in range(4)]
    choices = [random_routing(tokens, 128, 8, "cuda")[1] for _ in range(12)]
    x = torch.randn(tokens, 512, device="cuda").bfloat16()
    for _ in range(5):
        made = [stream.expert_products(x, chosen, banks[i % 4], SILU) for i, chosen in enumerate(choices)]
        for i, (got, chosen) in enumerate(zip(made, choices, strict=True)):
            BITWISE.check(got, kernels.expert_products(x, chosen, banks[i % 4], SILU, PLAN), f"layer {i}")
        x = torch.randn(tokens, 512, device="cuda").bfloat16()


def test_steps_take_these_kernels(monkeypatch):
    """Chosen by tokens and pairs an expert; a plan asked for keeps Triton."""
    bank = plain_bank(128, 72, 512, torch.bfloat16, device="cuda", spread=0.05)
    calls, run = [], stream.expert_products
    monkeypatch.setattr(stream, "expert_products", lambda *a: calls.append(len(a[0])) or run(*a))
    for tokens in (64, 65, 320, 321):
        x = torch.randn(tokens, 512, device="cuda").bfloat16()
        weights, chosen = random_routing(tokens, 128, 8, "cuda")
        got = kernels.routed_experts(x, weights, chosen, bank, SILU)
        BITWISE.check(got, kernels.routed_experts(x, weights, chosen, bank, SILU, PLAN))
        few = x[:4], weights[:4], chosen[:4]
        EXPERTS.equality.check(got[:4].bfloat16(), reference.routed_experts(*few, bank, SILU).bfloat16())
    assert calls == [65, 320]
