"""One token's experts on a CPU, through their real entry points: threads in a random order, every weight read counted.

The emulator aborts where the first launch reads the router's choice, or any launch hidden rows, before it has waited
for the kernel in front; shared memory starts as NaN.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import emulated
from helpers.banks import PlainBank, mxfp4_bank, plain_bank, random_routing
from helpers.moe import SILU, SITU

from anabranch.ops.expert_ffn import cuda, gemv
from anabranch.ops.expert_ffn.plan import GemvPlan, choose_gemv
from anabranch.ops.expert_ffn.reference import expert_ffn as reference
from anabranch.ops.expert_ffn.spec import EXPERT_FFN
from anabranch.ops.registry import IMPLEMENTATIONS

if why := emulated.why_not():
    pytest.skip(why, allow_module_level=True)

PLAN = GemvPlan(blocks=3, warps=2, down_warps=5)


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    built = emulated.loaded(monkeypatch, "expert_ffn")
    built.asked()
    return built


def matrices(inner: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (torch.randn(2 * inner, width) * 0.1).bfloat16(), (torch.randn(width, inner) * 0.1).bfloat16()


def inputs(experts: int, inner: int, width: int, top_k: int, shared: int | None = 40) -> dict[str, Any]:
    """One token inside a wider row of NaN; a shared expert of another inner width."""
    wide = torch.full((1, width + 16), torch.nan).bfloat16()
    wide[:, 8 : 8 + width] = torch.randn(1, width)
    weights, chosen = random_routing(1, experts, top_k)
    bank = plain_bank(experts, inner, width, torch.bfloat16, spread=0.1)
    own = None if shared is None else matrices(shared, width)
    made = {"x": wide[:, 8 : 8 + width], "weights": weights, "experts": chosen, "bank": bank}
    return made | {"activation": SILU, "shared": own}


def check(given: dict[str, Any], plan: GemvPlan = PLAN) -> torch.Tensor:
    got = gemv.expert_ffn(**given, plan=plan)
    EXPERT_FFN.equality.check(got, reference(**given, linear=torch.nn.functional.linear))
    return got


@pytest.mark.parametrize(
    ("experts", "inner", "width", "top_k", "shared"),
    [
        (8, 24, 104, 3, 40),  # less than a chunk of 256 columns
        (5, 8, 264, 2, None),  # one lane in the second chunk
        (12, 40, 136, 9, 8),  # more pairs than warps have turns
        (2, 8, 2312, 1, None),  # two passes
        (2, 1024, 40, 2, 1032),  # the shared expert's columns take a second pass
    ],
)
def test_odd_shapes_read_every_wanted_weight_once(module, experts, inner, width, top_k, shared):
    check(inputs(experts, inner, width, top_k, shared))
    assert module.asked() == 2 * 3 * width * (top_k * inner + (shared or 0))


def test_the_activation_of_k3_with_and_without_a_cap():
    given = inputs(6, 24, 72, 2)
    for activation in (SITU, replace(SITU, linear_beta=None)):
        check(given | {"activation": activation})


@pytest.mark.parametrize("first", [0, 4, 10])
def test_other_ranks_experts_are_left_out(module, first):
    """With the last range no expert is local: zeros, or the shared expert alone."""
    given = inputs(10, 24, 72, 5)
    whole = given["bank"]
    span = slice(first, first + 4) if first < 10 else slice(0, 4)
    given["bank"] = PlainBank(first=first, count=4, w13=whole.w13[span].clone(), w2=whole.w2[span].clone())
    check(given)
    module.asked()
    got = check(given | {"shared": None})
    local = ((given["experts"] >= first) & (given["experts"] < first + 4)).sum().item()
    assert module.asked() == 2 * 3 * 72 * 24 * local
    assert first < 10 or not got.any()


def test_no_plan_and_no_order_of_threads_changes_a_bit(module):
    given = inputs(8, 24, 72, 3)
    want = check(given)
    plans = (
        replace(PLAN, blocks=1, warps=1, down_warps=1),
        replace(PLAN, blocks=7, warps=4),
        replace(PLAN, blocks=60, warps=1, down_warps=2, chained=False),
    )
    for seed, plan in enumerate(plans):
        module.seed(50 + seed)
        assert torch.equal(gemv.expert_ffn(**given, plan=plan), want), plan


def test_a_nan_and_an_infinity_stay_where_they_belong():
    """In a column of one expert's down matrix, in a pair that nobody wants, and behind no row's end."""
    given = inputs(8, 24, 72, 3)
    clean, chosen = check(given), given["experts"][0]
    unwanted = next(e for e in range(8) if e not in chosen)
    given["bank"].w13[unwanted], given["bank"].w2[unwanted] = torch.nan, torch.inf
    given["bank"].w2[chosen[1], 5] = torch.nan
    got = check(given)
    assert got[0, 5].isnan()
    assert torch.equal(got[0, torch.arange(72) != 5], clean[0, torch.arange(72) != 5])


REFUSED = {
    "the experts are not plain matrices": lambda g: {"bank": mxfp4_bank(8, 32, 64, torch.bfloat16)},
    "gate-up is torch.float32": lambda g: {"bank": plain_bank(8, 24, 72, torch.float32)},
    "rows of shared down have 4 columns": lambda g: {"shared": matrices(4, 72)},
    "shared gate-up is not dense": lambda g: {"shared": (matrices(24, 144)[0][:, :72], g["shared"][1])},
    "not one dense token": lambda g: {"x": torch.zeros(1, 144).bfloat16()[:, ::2]},
    "width 7176": lambda g: inputs(2, 8, 7176, 1, None),
    "of 8200 columns": lambda g: inputs(2, 8200, 8, 1, None),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_the_kernels_were_not_made_for_is_refused_by_name_and_goes_to_the_tiles(monkeypatch, message):
    given, calls = inputs(8, 24, 72, 3), []
    given |= REFUSED[message](given)
    with pytest.raises(ValueError, match=f"expert_ffn: .*{message}"):
        gemv.expert_ffn(**given, plan=PLAN)
    monkeypatch.setattr(cuda.triton, "expert_ffn", lambda *inputs: calls.append(inputs))
    cuda.expert_ffn(**given, linear=torch.nn.functional.linear)
    assert len(calls) == 1


def test_latent_experts_more_tokens_and_narrow_shares_go_to_the_tiles(monkeypatch):
    calls: list[Any] = []
    monkeypatch.setattr(cuda.triton, "expert_ffn", lambda *inputs: calls.append(inputs))
    given: dict[str, Any] = inputs(8, 24, 72, 3) | {"linear": torch.nn.functional.linear}
    cuda.expert_ffn(**given, latent=torch.zeros(1, 72).bfloat16())
    cuda.expert_ffn(**given)
    assert choose_gemv(24) is None
    weights, chosen = random_routing(2, 8, 3)
    two: dict[str, Any] = {"x": torch.zeros(2, 72).bfloat16(), "weights": weights, "experts": chosen}
    cuda.expert_ffn(**given | two)
    assert len(calls) == 3
    with pytest.raises(ValueError, match="for latent experts"):
        cuda.expert_ffn(**given, latent=given["x"], plan=PLAN)
    with pytest.raises(ValueError, match="2 tokens with strides"):
        cuda.expert_ffn(**given | two, plan=PLAN)


def test_models_of_plain_experts_take_it_and_deterministic_mode_does_not(real_kl, real_k3):
    form = IMPLEMENTATIONS["expert_ffn"][0]
    assert (form.name, form.batch_invariant) == ("cuda", False)
    assert form.fits is not None
    assert form.fits(real_kl).ok
    assert choose_gemv(real_kl.moe.intermediate_size) is not None
    assert form.fits(real_k3).reason == "needs plain experts of the hidden width"
    wide = form.fits(replace(real_kl, hidden_size=8192))
    assert (wide.ok, wide.reason) == (False, "needs multiples of 8, hidden_size up to 7168; they are 8192 and 1024")
