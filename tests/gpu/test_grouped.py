"""The grouped products of prompts on a Hopper GPU: the bits of the Triton kernels, runs of any length, graphs."""

import pytest
import torch
from helpers.banks import PlainBank, plain_bank, random_routing
from helpers.moe import SILU, SITU

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("tvm_ffi")

from anabranch.ops.experts import grouped, reference
from anabranch.ops.experts import triton as kernels
from anabranch.ops.experts.plan import Plan, Tile
from anabranch.ops.experts.spec import EXPERTS
from anabranch.ops.spec import BITWISE

if not grouped.available(0):
    pytest.skip("needs a Hopper GPU and built or buildable kernels", allow_module_level=True)

# no plan changes a bit, so one of them stands for all
PLAN = Plan(wide=Tile(T=64, R=64, K=64), narrow=Tile(T=64, R=128, K=64))
RUNS = [0, 1, 63, 64, 65, 300, 0, 31, 32, 33, 127, 128, 129, 160, 161, 255, 256, 257, 271, 272, 273, 512, 513, 545, 2]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def triton(x, chosen, bank, activation) -> torch.Tensor:
    return kernels.expert_products(x, chosen, bank, activation, PLAN)


def agree(x, chosen, bank, activation, tile: int | None = None) -> None:
    """Every row of a local pair has the bits of the Triton kernel, no other row is written."""
    want = triton(x, chosen, bank, activation)
    if tile is None:
        got = grouped.expert_products(x, chosen, bank, activation)
    else:
        made = grouped.sort(chosen, bank.first, bank.count, tile)
        got = grouped.products(x, made, bank, activation, programs=132)
    local = ((chosen >= bank.first) & (chosen < bank.first + bank.count)).flatten()
    assert want[local].isfinite().all()
    assert got[~local].isnan().all()
    BITWISE.check(got[local], want[local])


@pytest.mark.parametrize("tile", grouped.TILES)
@pytest.mark.parametrize(("inner", "width", "activation"), [(1024, 2304, SILU), (72, 136, SITU), (184, 344, SILU)])
def test_runs_of_any_length(inner, width, activation, tile):
    """Blocks of weight rows that are full, that are not, and three of them."""
    chosen = torch.cat([torch.full((n,), e, device="cuda") for e, n in enumerate(RUNS)])
    chosen = chosen[torch.randperm(len(chosen), device="cuda")][:, None]
    bank = plain_bank(len(RUNS), inner, width, torch.bfloat16, device="cuda", spread=0.05)
    x = torch.randn(len(chosen), width + 24, device="cuda").bfloat16()[:, 8 : 8 + width]
    agree(x, chosen, bank, activation, tile)


@pytest.mark.parametrize("tile", grouped.TILES)
@pytest.mark.parametrize("programs", [1, 2, 7, 64])
def test_fewer_programs_than_multiprocessors(programs, tile):
    """The same bits."""
    bank = plain_bank(12, 96, 520, torch.bfloat16, device="cuda", spread=0.05)
    x, (_, chosen) = torch.randn(900, 520, device="cuda").bfloat16(), random_routing(900, 12, 4, "cuda")
    got = grouped.products(x, grouped.sort(chosen, 0, 12, tile), bank, SILU, programs)
    BITWISE.check(got, triton(x, chosen, bank, SILU))


def test_a_token_of_nan_stays_alone():
    """Its rows lie in the tiles of others, and behind the ends of shorter tiles that come later."""
    bank = plain_bank(24, 128, 264, torch.bfloat16, device="cuda", spread=0.05)
    x, (_, chosen) = torch.randn(1501, 264, device="cuda").bfloat16(), random_routing(1501, 24, 8, "cuda")
    want, poisoned = grouped.expert_products(x, chosen, bank, SILU), torch.arange(0, 1501, 5, device="cuda")
    x[poisoned] = torch.nan
    got = grouped.expert_products(x, chosen, bank, SILU).view(1501, 8, 264)
    assert got[poisoned].isnan().all()
    kept = torch.ones(1501, dtype=torch.bool, device="cuda").index_fill_(0, poisoned, False)
    BITWISE.check(got[kept], want.view(1501, 8, 264)[kept])


@pytest.mark.parametrize("tokens", [17, 100, 3001, 20_000])
def test_prompts_of_kimi_linear(tokens):
    bank = plain_bank(256, 1024, 2304, torch.bfloat16, device="cuda")
    x, (weights, chosen) = torch.randn(tokens, 2304, device="cuda").bfloat16(), random_routing(tokens, 256, 8, "cuda")
    agree(x, chosen, bank, SILU)
    if tokens == 3001:
        n, got = 40, kernels.routed_experts(x, weights, chosen, bank, SILU)
        want = reference.routed_experts(x[:n], weights[:n], chosen[:n], bank, SILU)
        EXPERTS.equality.check(got[:n].bfloat16(), want.bfloat16(), "against the reference")


def test_other_ranks_experts_are_left_out():
    whole = plain_bank(256, 256, 512, torch.bfloat16, device="cuda")
    part = PlainBank(first=64, count=128, w13=whole.w13[64:192], w2=whole.w2[64:192])
    x, (_, chosen) = torch.randn(5000, 512, device="cuda").bfloat16(), random_routing(5000, 256, 8, "cuda")
    agree(x, chosen, part, SILU)
    nobody = chosen % 64  # none of this rank's: no tile, and nothing written
    assert grouped.expert_products(x, nobody, part, SILU).isnan().all()


def test_a_graph_replays_with_other_inputs():
    bank = plain_bank(32, 256, 512, torch.bfloat16, device="cuda", spread=0.05)
    x, (_, chosen) = torch.randn(2000, 512, device="cuda").bfloat16(), random_routing(2000, 32, 8, "cuda")
    grouped.expert_products(x, chosen, bank, SILU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped.expert_products(x, chosen, bank, SILU)
    for _ in range(5):
        x.copy_(torch.randn(2000, 512, device="cuda"))
        chosen.copy_(random_routing(2000, 32, 8, "cuda")[1])
        out.fill_(torch.nan)
        graph.replay()
        BITWISE.check(out, triton(x, chosen, bank, SILU))


def test_prompts_take_these_kernels(monkeypatch):
    """The choice is made by pairs an expert, and a plan asked for keeps Triton."""
    bank = plain_bank(16, 64, 128, torch.bfloat16, device="cuda")
    x, calls = torch.randn(1024, 128, device="cuda").bfloat16(), []
    run = grouped.expert_products
    monkeypatch.setattr(grouped, "expert_products", lambda *a: calls.append(len(a[0])) or run(*a))
    for tokens in (1024, 64):
        _, chosen = random_routing(tokens, 16, 8, "cuda")
        kernels.expert_products(x[:tokens], chosen, bank, SILU)
        triton(x[:tokens], chosen, bank, SILU)
    assert calls == [1024]
