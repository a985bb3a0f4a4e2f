"""MXFP4 experts on a GPU: exact tiles, and the bits of the dequantised experts whatever the plan, rank or replay."""

import pytest
import torch
from helpers.banks import Mxfp4Bank, mxfp4_bank, random_routing
from helpers.moe import SITU
from helpers.mxfp4 import in_arranged_order, tiles_are_exact

from anabranch.ops.experts import reference
from anabranch.ops.experts.plan import Plan, Tile
from anabranch.ops.experts.spec import EXPERTS
from anabranch.ops.experts.triton import routed_experts
from anabranch.ops.mxfp4.triton import NATIVE, tile_form
from anabranch.ops.spec import BITWISE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
EXPERT_COUNT, INNER, WIDTH, TOP_K = 64, 384, 3584, 16  # one of eight K3 ranks, with fewer experts


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def bank() -> Mxfp4Bank:
    torch.manual_seed(1)
    made = mxfp4_bank(EXPERT_COUNT, INNER, WIDTH, torch.bfloat16, device="cuda")
    made.w13_scale[:, 0, 0], made.w2_scale[:, 1, 1] = 0, 1  # the ends of the exponent range
    return made


def case(tokens: int, experts: int = EXPERT_COUNT) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = (torch.randn(tokens, WIDTH, device="cuda") * 0.1).bfloat16()
    return x, *random_routing(tokens, experts, TOP_K, "cuda")


@pytest.mark.parametrize("asm", [True, False])
def test_every_code_under_every_scale_is_exact(asm):
    tiles_are_exact("cuda", asm)


@pytest.mark.parametrize("tokens", [1, 16, 500])
def test_bits_are_those_of_the_dequantised_experts(bank, tokens):
    assert tile_form(WIDTH, torch.bfloat16) == tile_form(INNER, torch.bfloat16) == NATIVE
    x, weights, chosen = case(tokens)
    plain, order = in_arranged_order(bank)
    got = routed_experts(x, weights, chosen, bank, SITU)
    want = routed_experts(x[:, order].contiguous(), weights, chosen, plain, SITU)
    # rows of `down` stand as they did, so the outputs need no arranging
    BITWISE.check(got, want)
    EXPERTS.equality.check(got.bfloat16(), reference.routed_experts(x, weights, chosen, bank, SITU).bfloat16())


PLANS = (
    Plan(wide=Tile(T=16, R=32, K=128), narrow=Tile(T=16, R=128, K=128, num_stages=2), few=0),
    Plan(wide=Tile(T=32, R=64, K=128, stacked=True), narrow=Tile(T=32, R=64, K=128, num_stages=3)),
    Plan(
        wide=Tile(T=64, R=128, K=128, num_warps=8, num_stages=3),
        narrow=Tile(T=64, R=128, K=128, num_warps=8, num_stages=3),
    ),
)


@pytest.mark.parametrize("plan", PLANS)
def test_no_plan_changes_a_bit(bank, plan):
    x, weights, chosen = case(40)
    want = routed_experts(x, weights, chosen, bank, SITU)
    BITWISE.check(routed_experts(x, weights, chosen, bank, SITU, plan), want)
    BITWISE.check(routed_experts(x[3:4], weights[3:4], chosen[3:4], bank, SITU), want[3:4], "a token alone")


def test_ranks_add_up(bank):
    x, weights, chosen = case(70)
    whole, total = routed_experts(x, weights, chosen, bank, SITU), torch.zeros(70, WIDTH, device="cuda")
    for first in (0, 16, 48):
        count = 32 if first == 16 else 16
        stacks = {name: getattr(bank, name)[first : first + count] for name in vars(bank) if name.startswith("w")}
        part = Mxfp4Bank(first=first, count=count, total=EXPERT_COUNT, dtype=torch.bfloat16, **stacks)
        total += routed_experts(x, weights, chosen, part, SITU)
    # fp32 sums of 16 outputs in another order
    assert (total - whole).abs().max() <= 1e-6 * whole.abs().max()


@pytest.mark.parametrize(("inner", "width"), [(192, 3584), (384, 2400)])
def test_a_matrix_without_whole_blocks_on_one_side(inner, width):
    part = mxfp4_bank(8, inner, width, torch.bfloat16, device="cuda")
    x = (torch.randn(33, width + 8, device="cuda") * 0.1).bfloat16()[:, 8:]
    weights, chosen = random_routing(33, 8, 3, "cuda")
    got = routed_experts(x, weights, chosen, part, SITU)
    EXPERTS.equality.check(got.bfloat16(), reference.routed_experts(x, weights, chosen, part, SITU).bfloat16())


def test_a_graph_replays_with_other_inputs(bank):
    old = case(32)
    routed_experts(*old, bank, SITU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = routed_experts(*old, bank, SITU)
    for _ in range(3):
        fresh = case(32)
        for place, value in zip(old, fresh, strict=True):
            place.copy_(value)
        out.fill_(float("nan"))
        graph.replay()
        BITWISE.check(out, routed_experts(*fresh, bank, SITU))
