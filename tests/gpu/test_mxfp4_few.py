"""MXFP4 experts of few pairs each in CUDA C++ on a Hopper GPU: the bits of the Triton kernels, runs of any length."""

import pytest
import torch
from helpers.banks import Mxfp4Bank, mxfp4_bank, random_routing
from helpers.moe import SILU, SITU

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("tvm_ffi")

from anabranch.ops.expert_ffn.triton import expert_ffn
from anabranch.ops.experts import reference
from anabranch.ops.experts import triton as kernels
from anabranch.ops.experts.plan import choose_plan
from anabranch.ops.experts.spec import EXPERTS
from anabranch.ops.linear.skinny import linear
from anabranch.ops.mxfp4 import cuda
from anabranch.ops.skinny_gemm import cuda as skinny
from anabranch.ops.spec import BITWISE

if not cuda.available(0):
    pytest.skip("needs a Hopper GPU and built or buildable kernels", allow_module_level=True)

PLAN = choose_plan(32, 16, 896, torch.bfloat16, fp4=True)  # no plan changes a bit, so one of them stands for all
RUNS = [0, 1, 7, 8, 9, 0, 15, 16, 17, 24, 2, 33, 64, 3]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def rows(tokens: int, width: int) -> torch.Tensor:
    """Of a pitch and at a place that is no multiple of anything."""
    return (torch.randn(tokens, width + 24, device="cuda") * 0.1).bfloat16()[:, 3 : 3 + width]


def agree(x, chosen, bank, activation, tile=None) -> None:
    """Every row of a local pair has the bits of the Triton kernel, no other row is written."""
    got = cuda.expert_products(x, chosen, bank, activation, tile)
    want = kernels.expert_products(x, chosen, bank, activation, PLAN)
    local = ((chosen >= bank.first) & (chosen < bank.first + bank.count)).flatten()
    assert got[~local].isnan().all()
    assert torch.equal(got[local].isnan(), want[local].isnan())
    BITWISE.check(got[local].nan_to_num(), want[local].nan_to_num())


def part_of(bank: Mxfp4Bank, first: int, count: int) -> Mxfp4Bank:
    stacks = {name: getattr(bank, name)[first : first + count] for name in vars(bank) if name.startswith("w")}
    return Mxfp4Bank(first=first, count=count, total=bank.total, dtype=bank.dtype, **stacks)


@pytest.mark.parametrize("tile", [8, 16])
@pytest.mark.parametrize(
    ("inner", "width", "activation"), [(384, 3584, SITU), (3072, 3584, SITU), (1024, 2304, SILU), (128, 640, SILU)]
)
def test_runs_of_any_length(inner, width, activation, tile):
    chosen = torch.cat([torch.full((n,), e, device="cuda") for e, n in enumerate(RUNS)])
    chosen = chosen[torch.randperm(len(chosen), device="cuda")][:, None]
    bank = mxfp4_bank(len(RUNS), inner, width, torch.bfloat16, device="cuda")
    agree(rows(len(chosen), width), chosen, bank, activation, tile)


@pytest.mark.parametrize("tile", [8, 16])
def test_scales_of_either_size_at_the_ends_of_the_range_and_nan(tile):
    bank = mxfp4_bank(16, 384, 512, torch.bfloat16, device="cuda")
    for scale in (bank.w13_scale, bank.w2_scale):
        scale[:8].random_(100, 133)
        scale[8, ::3], scale[9, 1::5], scale[10, 7, 2] = 0, 1, 255
    agree(rows(20, 512), random_routing(20, 16, 5, "cuda")[1], bank, SITU, tile)


def test_other_ranks_experts_are_left_out():
    part = part_of(mxfp4_bank(64, 256, 512, torch.bfloat16, device="cuda"), 16, 24)
    chosen = random_routing(40, 64, 8, "cuda")[1]
    agree(rows(40, 512), chosen, part, SILU)
    nobody = chosen % 16
    assert cuda.expert_products(rows(40, 512), nobody, part, SILU).isnan().all()


def test_a_token_of_nan_stays_alone():
    bank, (_, chosen) = mxfp4_bank(24, 128, 256, torch.bfloat16, device="cuda"), random_routing(50, 24, 4, "cuda")
    x = rows(50, 256)
    want = cuda.expert_products(x, chosen, bank, SILU).view(50, 4, 256)
    x[::5] = torch.nan
    got = cuda.expert_products(x, chosen, bank, SILU).view(50, 4, 256)
    kept = torch.arange(50, device="cuda") % 5 != 0
    assert got[~kept].isnan().all()
    BITWISE.check(got[kept], want[kept])


@pytest.mark.parametrize("tokens", [33, 600])
def test_many_layers_behind_each_other(unpoisoned, tokens):
    """Nothing between launches, a sort of one launch or three: tables are read while the kernel before still runs."""
    total = tokens * 8 // 6
    banks = [mxfp4_bank(total, 128, 384, torch.bfloat16, device="cuda") for _ in range(4)]
    choices = [random_routing(tokens, total, 8, "cuda")[1] for _ in range(12)]
    x = rows(tokens, 384)

    def run() -> list[torch.Tensor]:
        return [cuda.expert_products(x, chosen, banks[i % 4], SILU) for i, chosen in enumerate(choices)]

    def check(made: list[torch.Tensor]) -> None:
        for i, (got, chosen) in enumerate(zip(made, choices, strict=True)):
            BITWISE.check(got, kernels.expert_products(x, chosen, banks[i % 4], SILU, PLAN), f"layer {i}")

    check(run())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
    for _ in range(10):
        x.copy_(rows(tokens, 384))
        for chosen in choices:
            chosen.copy_(random_routing(tokens, total, 8, "cuda")[1])
        graph.replay()
        check(made)


def test_steps_take_these_kernels(monkeypatch):
    """Chosen by pairs an expert, a plan asked for keeps Triton; a shared expert then has launches of its own.

    x lies on 16 bytes, as the engine's does: elsewhere the model's product would leave few tokens to the library too.
    """
    bank, calls, run = mxfp4_bank(112, 384, 3584, torch.bfloat16, device="cuda"), [], cuda.expert_products
    monkeypatch.setattr(cuda, "expert_products", lambda *a: calls.append(len(a[0])) or run(*a))
    shared = rows(1536, 7168).contiguous(), rows(7168, 768).contiguous()
    for tokens in (1, 8, 98, 99):
        x, z = (torch.randn(tokens, 7168, device="cuda") * 0.1).bfloat16(), rows(tokens, 3584)
        assert skinny.fits(x, shared[0])
        weights, chosen = random_routing(tokens, 112, 16, "cuda")
        got = kernels.routed_experts(z, weights, chosen, bank, SITU)
        BITWISE.check(got, kernels.routed_experts(z, weights, chosen, bank, SITU, PLAN))
        few = z[:4], weights[:4], chosen[:4]
        EXPERTS.equality.check(got[:4].bfloat16(), reference.routed_experts(*few, bank, SITU).bfloat16())
        both = (x, weights, chosen, bank, SITU, shared, linear, z)
        BITWISE.check(expert_ffn(*both), expert_ffn(*both, PLAN))
    assert calls == [1, 1, 8, 8, 98, 98]
