"""Norm, router and choice on a CPU, by their real entry point: threads in a random order, every weight read counted.

The emulator aborts where a token is read, a word sent or a row stored before the kernel in front has ended, and where a
word meets one that is still there. Shared memory and outputs start as NaN.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import emulated
from helpers.moe import MOE

from anabranch.ops.registry import IMPLEMENTATIONS
from anabranch.ops.router import cuda, reference
from anabranch.ops.router.plan import FEW_TOKENS, NARROW_EXPERTS, NARROW_WIDTH, scratch_words
from anabranch.ops.router.spec import NORM_ROUTE, ROUTER
from anabranch.ops.spec import BITWISE

if why := emulated.why_not():
    pytest.skip(why, allow_module_level=True)

EPS = 1e-5
# small shapes, odd ones, two and four pieces of a row, more experts than the narrow kernels take
SHAPES = [(72, 20, 3), (8, 2, 2), (2312, 33, 8), (4104, 9, 1), (264, 258, 16), (520, 64, 32)]


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    built = emulated.loaded(monkeypatch, "router")
    built.asked()
    return built


def between_poison(rows: int, width: int) -> torch.Tensor:
    wide = torch.full((rows, width + 16), torch.nan).bfloat16()
    wide[:, 8 : 8 + width] = torch.randn(rows, width)
    return wide[:, 8 : 8 + width]


def inputs(tokens: int, width: int, experts: int, top_k: int) -> dict[str, Any]:
    moe = replace(MOE, experts=experts, top_k=top_k)
    weight = (torch.randn(experts, width) * 2 / width**0.5).bfloat16()
    bias, sync = torch.randn(experts) * 0.1, torch.zeros(scratch_words(experts), dtype=torch.int32)
    norm = {"x": between_poison(tokens, width), "update": between_poison(tokens, width)}
    norm |= {"gain": torch.randn(width).bfloat16(), "eps": EPS}
    return norm | {"weight": weight, "bias": bias, "moe": moe, "sync": sync}


def check(given: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The kernel against the reference, whose router reads the kernel's own normed rows."""
    got = cuda.norm_route(**given)
    total, y, *_ = reference.norm_route(**given)
    BITWISE.check(got[0], total, "total")
    NORM_ROUTE.equality.check(got[1], y, "y")
    weights, experts = reference.route(got[1], given["weight"], given["bias"], given["moe"])
    BITWISE.check(got[3], experts, "experts")
    ROUTER.equality.check(got[2], weights, "weights")
    assert not given["sync"].any()
    return got


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, FEW_TOKENS])
@pytest.mark.parametrize(("width", "experts", "top_k"), SHAPES)
def test_odd_shapes_read_every_weight_once(module, tokens, width, experts, top_k):
    given = inputs(tokens, width, experts, top_k)
    check(given)
    wide = width > NARROW_WIDTH or experts > NARROW_EXPERTS
    workers = -(-experts // (8 if wide else 2))
    assert module.asked() == 2 * width * (experts + workers)
    got = cuda.route(given["x"], given["weight"], given["bias"], given["moe"], given["sync"])
    want = reference.route(given["x"], given["weight"], given["bias"], given["moe"])
    ROUTER.equality.check(got[0], want[0])
    BITWISE.check(got[1], want[1])
    assert module.asked() == 2 * width * experts


def test_a_tokens_bits_know_neither_its_neighbours_nor_the_order_of_threads(module):
    for shape in ((2312, 33, 8), (264, 258, 16)):
        given = inputs(FEW_TOKENS, *shape)
        want = check(given)
        for seed, rows in enumerate((slice(0, 1), slice(3, 5), slice(4, 8), slice(2, 8))):
            module.seed(70 + seed)
            some = given | {"x": given["x"][rows], "update": given["update"][rows]}
            for one, all_ in zip(cuda.norm_route(**some), want, strict=True):
                BITWISE.check(one, all_[rows])


def test_without_an_update_the_row_is_the_sum():
    given: dict[str, Any] = inputs(2, 72, 20, 3) | {"update": None}
    got = cuda.norm_route(**given)
    assert got[0] is given["x"]
    want = reference.norm_route(**given)
    NORM_ROUTE.equality.check(got[1], want[1])
    BITWISE.check(got[3], want[3])


def test_the_lower_index_wins_a_tie_and_the_bias_only_chooses():
    given = inputs(1, 8, 128, 6)
    given |= {"weight": torch.zeros(128, 8).bfloat16(), "bias": torch.zeros(128)}
    assert check(given)[3].tolist() == [[0, 1, 2, 3, 4, 5]]
    given["bias"][[3, 77, 126, 127]] = torch.tensor([1.0, 2.0, 1.0, 1.0])
    got = check(given)
    assert got[3].tolist() == [[77, 3, 126, 127, 0, 1]]
    torch.testing.assert_close(got[2], torch.full((1, 6), MOE.scaling / 6))


@pytest.mark.parametrize("change", [{"renormalize": False}, {"scaling": 1.0}, {"top_k": 1}])
def test_weights(change):
    given = inputs(2, 72, 20, 3)
    check(given | {"moe": replace(given["moe"], **change)})


def test_saturated_scores_and_an_infinite_bias():
    given = inputs(1, 8, 20, 4)
    given["weight"] *= 1000
    given["bias"][5], given["bias"][6] = -torch.inf, torch.inf
    assert check(given)[3][0, 0] == 6
    assert 5 not in check(given)[3]


def test_nan_comes_first_and_stays_with_its_token():
    given = inputs(3, 72, 20, 3)
    clean = check(given)
    given["update"][1, 9] = torch.nan
    got = cuda.norm_route(**given)
    assert got[3][1].tolist() == [0, 1, 2]
    assert got[1][1].isnan().any()
    for kept, was in zip(got, clean, strict=True):
        BITWISE.check(kept[::2], was[::2])
    given["update"][1, 9] = 0.0
    given["weight"][11, 0] = torch.nan
    experts, weights = cuda.norm_route(**given)[3], cuda.norm_route(**given)[2]
    assert (experts[:, 0] == 11).all()
    assert weights.isnan().all()
    assert not given["sync"].any()


REFUSED = {
    "0 tokens": lambda g: {"x": g["x"][:0], "update": g["update"][:0]},
    "9 tokens": lambda g: inputs(9, 72, 20, 3),
    "sigmoid scores of one expert group, they are softmax of 1": lambda g: {"moe": replace(MOE, scoring="softmax")},
    "of one expert group, they are sigmoid of 4": lambda g: {"moe": replace(MOE, groups=4)},
    "a multiple of 8 up to 8192, it is 76": lambda g: inputs(1, 76, 20, 3),
    "up to 32 of 1024 experts, they are 33 of 64": lambda g: {"moe": replace(MOE, experts=64, top_k=33)},
    "x is torch.float32": lambda g: {"x": g["x"].float()},
    "update has strides": lambda g: {"update": torch.zeros(2, 144).bfloat16()[:, ::2]},
    r"gain is torch.bfloat16 \[1, 64\]": lambda g: {"gain": g["gain"][:64]},
    "bias is torch.float64": lambda g: {"bias": g["bias"].double()},
    "sync holds 1 words, not 320": lambda g: {"sync": torch.zeros(1, dtype=torch.int32)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_the_kernel_was_not_made_for_is_refused_by_name_and_routed_by_triton(monkeypatch, message):
    given, calls = inputs(2, 72, 20, 3), []
    given |= REFUSED[message](given)
    with pytest.raises(ValueError, match=f"norm_route: .*{message}"):
        cuda.norm_route(**given)
    if not message.startswith(("update", "gain")):
        monkeypatch.setattr(cuda.triton, "route", lambda *inputs: calls.append(inputs))
        cuda.route(given["x"], given["weight"], given["bias"], given["moe"], given["sync"])
        assert len(calls) == 1


def test_both_models_take_the_router_and_one_of_them_the_norm_with_it(real_kl, real_k3):
    route, norm_route = IMPLEMENTATIONS["route"][0], IMPLEMENTATIONS["norm_route"][0]
    assert (route.name, norm_route.name) == ("cuda", "cuda")
    for form in (route, norm_route):
        assert not form.batch_invariant
        assert form.fits is not None
        assert form.fits(real_kl).ok
    assert route.fits is not None
    assert route.fits(real_k3).ok
    assert norm_route.fits is not None
    assert norm_route.fits(real_k3).reason == "attention residuals are read through a norm of their own"
    grouped = replace(real_kl, moe=replace(real_kl.moe, groups=8))
    for form in (route, norm_route):
        assert form.fits is not None
        assert form.fits(grouped).reason == "needs sigmoid scores of one expert group, they are sigmoid of 8"
        assert not form.fits(replace(real_kl, moe=None)).ok
