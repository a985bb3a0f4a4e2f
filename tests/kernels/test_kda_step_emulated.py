"""The CUDA decode step on a CPU, through its real entry point: every variant, threads in a random order.

Numbers of checks refer to the functional specification, section 7.
"""

from typing import Any

import pytest
import torch
from helpers import emulated
from helpers.kda_inputs import fresh_pools, kinds, rows_of, step_inputs

from anabranch.ops.kda_step import cuda
from anabranch.ops.kda_step.reference import kda_step as reference
from anabranch.ops.kda_step.spec import KDA_STEP

if why := emulated.why_not():
    pytest.skip(why, allow_module_level=True)

PLAIN = ("f32_s8_t128x8_reg", "f32_s1_t128x3_tma1_ef", "f32_s1_t128x3_bulk1_ef", "f32_s1_t256x3_tma1_efs")
HALVES = ("f32_s2_t128x6_tma1_ef", "f32_s2_t128x6_bulk1_ef", "f32_s2_t256x3_reg")
OTHERS = ("f32_s4_t128x4_reg", "f32_s1_t512x2_reg_ef")
BF16 = ("bf16_s8_t128x8_reg", "bf16_s1_t128x3_tma2_ef", "bf16_s1_t256x3_tma2")
F_B = ("f32_s4_t256x2_reg_fb", "f32_s1_t128x3_tma2_fb_ef", "f32_s1_t512x2_tma2_fb")
BF16_F_B = ("bf16_s4_t256x2_reg_fb", "bf16_s1_t128x3_tma2_fb_ef")
MANY = ("f32_s8_t128x4_reg_many", "f32_s1_t128x3_tma1_many_ef")
BF16_MANY = ("bf16_s8_t128x4_reg_many", "bf16_s1_t128x3_tma2_many_ef")
FAMILIES = (PLAIN + HALVES + OTHERS, BF16, F_B, BF16_F_B, MANY, BF16_MANY)
EVERY = pytest.mark.parametrize("variant", [name for family in FAMILIES for name in family])


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    built = emulated.loaded(monkeypatch, "kda_step")
    cuda.variants.cache_clear()
    yield built
    cuda.variants.cache_clear()


def run(given: dict[str, Any], variant: str, **plan: Any) -> torch.Tensor:
    more = {"early": plan.pop("early")} if "early" in plan else {}
    return cuda.kda_step(**given, **more, plan=cuda.Plan(variant, **plan))


def agree(got: dict[str, Any], want: dict[str, Any]) -> None:
    KDA_STEP.equality.check(got["state"], want["state"], "state")
    assert torch.equal(got["conv_pool"], want["conv_pool"])


def test_every_compiled_variant_is_tested_and_every_plan_is_compiled():
    assert set(cuda.variants()) == {name for family in FAMILIES for name in family}
    for (state, f_b, many), plans in cuda._PLANS.items():
        assert [most for most, _ in plans] == sorted(most for most, _ in plans)
        for _, plan in plans:
            tokens = 3 if many else 1
            assert kinds(plan.variant) == {"state_dtype": state, "f_b": f_b, "tokens": tokens}, plan
    assert cuda.choose(32, torch.float32).variant == PLAIN[0]
    assert cuda.choose(33, torch.float32).variant == PLAIN[1]


@EVERY
@pytest.mark.parametrize("bound", [None, -5.0])
def test_variant_equals_the_chain(variant, bound):
    """Checks 24, 26, 28, 33, 34, 42: slots -1, 0, beyond the pool, strided; three heads; canaries; both gates."""
    requests = 3 if bound else 1
    one = step_inputs(requests, 3, **kinds(variant), bound=bound, gap=1)
    wide = torch.full((requests, 3), 99)
    wide[:, 0] = one["slots"]
    if requests == 3:
        wide[0, 0], wide[1, 0] = 0, (-1 if "s1" in variant else 6)
        wide[2, 0] = 4
    one["slots"] = wide[:, 0]
    dead = (one["slots"] < 0) | (one["slots"] >= 6)
    tokens = kinds(variant)["tokens"]
    one["gate"][dead.repeat_interleave(tokens)] = float("nan")
    got, want = fresh_pools(one), fresh_pools(one)
    want["slots"] = torch.where(dead, -1, one["slots"])
    y, expected = run(got, variant), reference(**want)
    KDA_STEP.equality.check(y, expected, "y")
    agree(got, want)
    assert not y[dead.repeat_interleave(tokens)].any()
    untouched = [s for s in range(one["state"].shape[0]) if s not in one["slots"].tolist()]
    assert torch.equal(got["state"][untouched], one["state"][untouched])
    assert torch.equal(got["conv_pool"][untouched], one["conv_pool"][untouched])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family[0])
def test_variants_of_a_kind_give_the_same_bits_in_any_order_of_threads(family, module):
    """Check 41: no order of the threads shows, least of all in the window that all CTAs of a head read."""
    one, first = step_inputs(1, 2, **kinds(family[0])), None
    for seed, variant in enumerate(family):
        module.seed(100 + seed)
        got = fresh_pools(one)
        y = run(got, variant)
        first = first or (y, got)
        assert torch.equal(y, first[0]), variant
        assert all(torch.equal(got[pool], first[1][pool]) for pool in ("state", "conv_pool")), variant


@pytest.mark.parametrize("variant", [PLAIN[0], PLAIN[3], HALVES[0], MANY[1]])
def test_launch_options_change_no_bit_and_nothing_is_written_before_the_wait(variant):
    """The emulator aborts where the state is stored, or a dependent started unasked, before griddepcontrol.wait."""
    one = step_inputs(2, 2, **kinds(variant))
    want = fresh_pools(one)
    expected = run(want, variant, chained=False)
    for options in (*({"early": True, "release": when} for when in cuda.Release), {"prefetch": 3}):
        got = fresh_pools(one)
        assert torch.equal(run(got, variant, **options), expected), options
        assert torch.equal(got["state"], want["state"]), options


@pytest.mark.parametrize("variant", [PLAIN[0], PLAIN[1], PLAIN[2], BF16[1], F_B[0]])
def test_state_can_go_to_another_slot(variant):
    """Copy on write: two requests read one slot and write their own; -1 keeps nothing."""
    one = step_inputs(3, 2, **kinds(variant), spare=4)
    free = [s for s in range(7) if s not in one["slots"].tolist()]
    one["slots"][1] = one["slots"][0]
    one["keep"] = torch.tensor([[free[0]], [free[1]], [-1]])
    got, want = fresh_pools(one), fresh_pools(one)
    KDA_STEP.equality.check(run(got, variant), reference(**want), "y")
    agree(got, want)
    changed = [s for s in range(7) if not torch.equal(got["state"][s], one["state"][s])]
    assert changed == sorted(free[:2])


@pytest.mark.parametrize("variant", MANY + BF16_MANY)
def test_several_tokens_are_as_many_steps_bit_for_bit(variant, module):
    """Check 36: states after every token are kept on the way; what was accepted is one of them."""
    tokens, (single, *_) = 4, BF16 if variant.startswith("bf16") else PLAIN
    one = step_inputs(2, 2, state_dtype=kinds(variant)["state_dtype"], tokens=tokens, spare=8)
    free = [s for s in range(10) if s not in one["slots"].tolist()]
    one["keep"] = torch.tensor([[free[0], free[1], -1, free[2]], [-1, free[3], free[4], one["slots"][1]]])
    module.seed(7)
    got = fresh_pools(one)
    y = run(got, variant).unflatten(0, (2, tokens))
    steps = fresh_pools({k: v for k, v in one.items() if k != "keep"})
    for token in range(tokens):
        names = ("qkv", "forget", "beta_logits", "gate")
        assert torch.equal(run(steps | {n: one[n][token::tokens] for n in names}, single), y[:, token]), token
        for request in range(2):
            if (kept := int(one["keep"][request, token])) >= 0:
                slot = int(one["slots"][request])
                assert torch.equal(got["state"][kept], steps["state"][slot]), (token, request)
                assert torch.equal(got["conv_pool"][kept], steps["conv_pool"][slot]), (token, request)
    assert torch.equal(got["state"][one["slots"][0]], one["state"][one["slots"][0]])


@pytest.mark.parametrize("variant", [PLAIN[0], PLAIN[2], BF16[1], F_B[1], MANY[0]])
def test_a_request_is_alone_in_its_bits(variant):
    """Check 31: neither company nor a neighbour full of NaN and infinity changes a request's bits."""
    kind = kinds(variant)
    one = step_inputs(3, 2, **kind)
    sick = fresh_pools(one) | {"qkv": one["qkv"].clone(), "forget": one["forget"].clone()}
    tokens = kind["tokens"]
    sick["qkv"][tokens : 2 * tokens], sick["forget"][tokens : 2 * tokens] = float("nan"), float("inf")
    sick["state"][one["slots"][1]], sick["conv_pool"][one["slots"][1]] = float("-inf"), float("nan")
    got, alone = run(sick, variant), fresh_pools(one)
    assert got[tokens : 2 * tokens].isnan().any()
    for request in (0, 2):
        y = run(rows_of(alone, request, request + 1, tokens), variant)
        slot = int(one["slots"][request])
        assert torch.equal(y, got[request * tokens : (request + 1) * tokens])
        assert torch.equal(alone["state"][slot], sick["state"][slot])
        assert torch.equal(alone["conv_pool"][slot], sick["conv_pool"][slot])


def test_inside_f_b_is_that_of_a_rounded_product():
    """Check 43: an fp32 sum rounded to bf16 once, so the plain kernel behind such a product gives the same bits."""
    one = step_inputs(2, 2, f_b=True)
    got, want = fresh_pools(one), fresh_pools({k: v for k, v in one.items() if k != "f_b"})
    want["forget"] = (one["forget"].double() @ one["f_b"].double().T).bfloat16()
    assert torch.equal(run(got, F_B[1]), run(want, PLAIN[1]))
    assert torch.equal(got["state"], want["state"])


WRONG = {
    "conv_pool is of 4 slots, needs as many as state, 5": lambda d: {"conv_pool": d["conv_pool"][:4]},
    r"state is \[5, 3, 128, 64\], needs \[slots, 3, 128, 128\]": lambda d: {"state": d["state"][..., :64]},
    "state is torch.float16": lambda d: {"state": d["state"].half()},
    "state is at 4 bytes": lambda d: {"state": torch.zeros(5 * 3 * 128 * 128 + 1)[1:].view(5, 3, 128, 128)},
    r"qkv is \[2, 1151\], needs \[2, 1152\]": lambda d: {"qkv": d["qkv"][:, :-1]},
    "gate is torch.float32": lambda d: {"gate": d["gate"].float()},
    r"gate is of strides \(1, 2\), needs unit inner stride": lambda d: {"gate": d["gate"].t().contiguous().t()},
    "a_log is torch.float64": lambda d: {"a_log": d["a_log"].double()},
    r"slots is torch.int32 \[2\]": lambda d: {"slots": d["slots"].int()},
    r"keep is torch.int64 \[2, 2\], needs torch.int64 \[2, 1\]": lambda d: {
        "keep": torch.zeros(2, 2, dtype=torch.int64)
    },
    r"forget is \[2, 384\], needs \[2, 128\]": lambda d: {"f_b": torch.zeros(384, 128, dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_the_kernel_was_not_made_for_is_refused(message):
    """Checks 25, 38: unequal pools, strides and dtypes are an error before any launch, never a silent copy."""
    given = step_inputs(2, 3)
    with pytest.raises(ValueError, match=message):
        cuda.kda_step(**(given | WRONG[message](given)))


def test_no_request_is_no_launch_and_several_tokens_need_a_product_in_front():
    given = step_inputs(2, 2)
    assert cuda.kda_step(**rows_of(given, 0, 0)).shape == (0, 256)
    with pytest.raises(ValueError, match="f_b inside takes one token a request, not 3"):
        cuda.kda_step(**step_inputs(2, 2, tokens=3, f_b=True))
