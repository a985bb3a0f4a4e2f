"""The few-token router on a GPU: the bits of the Triton norm, the reference's choice, early starts, graphs.

Poisoned memory comes from the suite's own fixture; inside a capture the poison is part of the graph.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.banks import PlainBank, plain_bank
from helpers.moe import MOE, SILU

from anabranch.config.model import MoeConfig
from anabranch.ops import native
from anabranch.ops.expert_ffn.cuda import expert_ffn
from anabranch.ops.linear.skinny import linear
from anabranch.ops.norm.triton import add_rms_norm, rms_norm
from anabranch.ops.registry import select
from anabranch.ops.router import cuda, reference
from anabranch.ops.router.plan import FEW_TOKENS, scratch_words
from anabranch.ops.router.spec import NORM_ROUTE, ROUTER
from anabranch.ops.router.triton import route as triton_route
from anabranch.ops.spec import BITWISE

if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0) or not native.verdict("router").ok:
    pytest.skip("needs a Hopper GPU and built or buildable kernels", allow_module_level=True)

EPS = 1e-5
DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randn(*shape: int, spread: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * spread).bfloat16()


def box(experts: int) -> torch.Tensor:
    return torch.zeros(scratch_words(experts), dtype=torch.int32, device=DEVICE)


def inputs(tokens: int, width: int, experts: int, moe: MoeConfig) -> dict[str, Any]:
    """Rows between poison; logits of a spread of about 2."""
    rows = torch.full((2, tokens, width + 16), torch.nan, device=DEVICE).bfloat16()
    rows[:, :, 8 : 8 + width] = randn(2, tokens, width)
    norm = {"x": rows[0, :, 8 : 8 + width], "update": rows[1, :, 8 : 8 + width], "gain": randn(width), "eps": EPS}
    weight, bias = randn(experts, width, spread=2 / width**0.5), torch.randn(experts, device=DEVICE) * 0.1
    return norm | {"weight": weight, "bias": bias, "moe": moe, "sync": box(experts)}


def same_choice(got: torch.Tensor, want: torch.Tensor, y: torch.Tensor, given: dict[str, Any]) -> None:
    """Equal, except for neighbours whose biased scores differ by less than two orders of addition do."""
    if torch.equal(got, want):
        return
    scores = torch.sigmoid(y.double() @ given["weight"].double().T) + given["bias"].double()
    ours, theirs = scores.gather(1, got), scores.gather(1, want)
    assert ((ours - theirs).abs() <= 2e-6).all(), (got, want)


def check(given: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Sum and y against the Triton norm; the choice against the reference on y."""
    got = cuda.norm_route(**given)
    total, y = add_rms_norm(given["x"], given["update"], given["gain"], EPS)
    BITWISE.check(got[0], total, "total")
    (BITWISE if y.shape[1] > 2048 and y.shape[1] % 16 == 0 else NORM_ROUTE.equality).check(got[1], y, "y")
    weights, experts = reference.route(got[1], given["weight"], given["bias"], given["moe"])
    same_choice(got[3], experts, got[1], given)
    if torch.equal(got[3], experts):
        ROUTER.equality.check(got[2], weights, "weights")
    assert not given["sync"].any()
    return got


@pytest.mark.parametrize("tokens", range(1, FEW_TOKENS + 1))
def test_kimi_linear_has_the_bits_of_the_triton_norm(real_kl, tokens):
    for spread in (1.0, 30.0):
        given = inputs(tokens, 2304, 256, real_kl.moe)
        given["update"].mul_(spread)
        check(given)
        alone: dict[str, Any] = given | {"update": None}
        BITWISE.check(cuda.norm_route(**alone)[1], rms_norm(given["x"], given["gain"], EPS))


@pytest.mark.parametrize("tokens", [1, 3, FEW_TOKENS])
@pytest.mark.parametrize(
    ("width", "experts", "top_k"),
    [(7168, 896, 16), (72, 20, 3), (2056, 33, 8), (4096, 256, 8), (4104, 9, 1), (8192, 1024, 32), (264, 258, 16)],
)
def test_odd_shapes(tokens, width, experts, top_k):
    given = inputs(tokens, width, experts, replace(MOE, experts=experts, top_k=top_k))
    got = check(given)
    weights, chosen = cuda.route(got[1], given["weight"], given["bias"], given["moe"], given["sync"])
    BITWISE.check(weights, got[2])
    BITWISE.check(chosen, got[3])


def test_the_triton_router_agrees(real_kl):
    """Over many tokens, so that near neighbours occur."""
    given = inputs(FEW_TOKENS, 2304, 256, real_kl.moe)
    for _ in range(50):
        given["x"].copy_(randn(FEW_TOKENS, 2304))
        _, y, weights, experts = cuda.norm_route(**given)
        want = triton_route(y, given["weight"], given["bias"], real_kl.moe)
        same_choice(experts, want[1], y, given)
        if torch.equal(experts, want[1]):
            ROUTER.equality.check(weights, want[0])


def test_a_tokens_bits_know_neither_its_neighbours_nor_the_launch(real_kl):
    given = inputs(FEW_TOKENS, 2304, 256, real_kl.moe)
    want = check(given)
    for tokens in (1, 2, 3, 4, 5, FEW_TOKENS):
        for first in range(FEW_TOKENS - tokens + 1):
            rows = slice(first, first + tokens)
            some = given | {"x": given["x"][rows], "update": given["update"][rows], "chained": bool(first % 2)}
            for one, all_ in zip(cuda.norm_route(**some), want, strict=True):
                BITWISE.check(one, all_[rows])


def test_ties_saturation_and_nan():
    given = inputs(2, 8, 128, replace(MOE, experts=128, top_k=6))
    given["weight"].zero_()
    given["bias"].zero_()
    assert cuda.norm_route(**given)[3].tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    given["bias"][[3, 77, 126, 127]] = torch.tensor([1.0, 2.0, 1.0, 1.0], device=DEVICE)
    assert cuda.norm_route(**given)[3].tolist() == [[77, 3, 126, 127, 0, 1]] * 2
    given["bias"][5], given["bias"][6] = -torch.inf, torch.inf
    assert cuda.norm_route(**given)[3][0, 0] == 6
    given["x"][1, 3] = torch.nan
    _, y, weights, experts = cuda.norm_route(**given)
    assert experts[1].tolist() == [0, 1, 2, 3, 4, 5]
    assert y[1].isnan().any()
    assert weights[1].isnan().all()
    assert not weights[0].isnan().any()
    assert not given["sync"].any()


@pytest.fixture(scope="module")
def kl_bank() -> PlainBank:
    torch.manual_seed(2)
    return plain_bank(256, 1024, 2304, torch.bfloat16, device="cuda")


@pytest.mark.parametrize("tokens", [1, 2, FEW_TOKENS])
def test_a_chain_of_layers_reads_nothing_too_early(real_kl, kl_bank, monkeypatch, tokens):
    """Projection, norm with router, experts of 12 layers in a graph with new inputs each time, against launches that do
    not start early: what does might read another layer's or another step's rows."""
    given = inputs(1, 2304, 256, real_kl.moe)
    shared = randn(2048, 2304, spread=0.02), randn(2304, 1024, spread=0.02)
    projection = randn(2304, 2304, spread=0.02)
    own = (given["gain"], EPS, given["weight"], given["bias"], real_kl.moe, given["sync"])

    def steps(x: torch.Tensor, chained: bool) -> torch.Tensor:
        for _ in range(12):
            update = linear(x, projection)
            x, y, *routing = cuda.norm_route(x, update, *own, chained=chained)
            made = expert_ffn(y, *routing, kl_bank, SILU, shared, linear)
            x = torch.add(x, made, alpha=0.1)
        return x

    x = randn(tokens, 2304)
    steps(x, True)
    plain: Any = torch._C
    for name in ("empty", "empty_like"):  # poisoning would be a launch in between
        monkeypatch.setattr(torch, name, getattr(plain._VariableFunctions, name))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = steps(x, True)
    for _ in range(10):
        x.copy_(randn(tokens, 2304))
        graph.replay()
        got = out.clone()
        assert torch.equal(got, steps(x, False))
        assert got.isfinite().all()
        assert not given["sync"].any()


def test_more_tokens_and_softmax_go_to_triton(real_kl):
    for tokens, moe in ((FEW_TOKENS + 1, real_kl.moe), (2, replace(real_kl.moe, scoring="softmax"))):
        given = inputs(tokens, 2304, 256, moe)
        y = given["x"].contiguous()
        got = cuda.route(y, given["weight"], given["bias"], moe, given["sync"])
        want = triton_route(y, given["weight"], given["bias"], moe, given["sync"])
        for one, other in zip(got, want, strict=True):
            BITWISE.check(one, other)
        with pytest.raises(ValueError, match="norm_route: "):
            cuda.norm_route(**given)


def test_the_models_choose_it(real_kl, real_k3):
    kl, k3 = select(real_kl, DEVICE).chosen, select(real_k3, DEVICE).chosen
    assert [kl[name][0] for name in ("route", "norm_route")] == ["cuda", "cuda"]
    assert [k3[name][0] for name in ("route", "norm_route")] == ["cuda", "chain"]
    fixed = select(real_kl, DEVICE, deterministic=True).chosen
    assert [fixed[name][0] for name in ("route", "norm_route")] == ["triton", "chain"]
