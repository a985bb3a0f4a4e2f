"""The CUDA decode step on an H200: head counts, batches, layouts, bits of all variants, launch chains, long runs.

Numbers of checks refer to the functional specification, section 7.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.kda_inputs import D, exact_step, fresh_pools, kinds, rows_of, step_inputs

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("tvm_ffi")

from anabranch.ops import native
from anabranch.ops.kda_step import cuda
from anabranch.ops.kda_step.reference import kda_step as reference
from anabranch.ops.kda_step.spec import KDA_STEP
from anabranch.ops.norm.triton import rms_norm
from anabranch.ops.registry import select

if torch.cuda.get_device_capability() != (9, 0) or not native.verdict("kda_step").ok:
    pytest.skip("needs a Hopper GPU and built or buildable kernels", allow_module_level=True)

NAMES = ("qkv", "forget", "beta_logits", "gate")
STATES = pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
BOUNDS = pytest.mark.parametrize("bound", [None, -5.0])


def inputs(requests: int, heads: int, **options: Any) -> dict[str, Any]:
    return step_inputs(requests, heads, device="cuda", **options)


def run(given: dict[str, Any], variant: str | None = None, early: bool = False, **plan: Any) -> torch.Tensor:
    return cuda.kda_step(**given, early=early, plan=cuda.Plan(variant, **plan) if variant else None)


def families() -> dict[tuple, list[str]]:
    """Variants that must give equal bits."""
    found: dict[tuple, list[str]] = {}
    for name in cuda.variants():
        found.setdefault(tuple(kinds(name).items()), []).append(name)
    return found


def close(got: torch.Tensor, want: torch.Tensor, bound: float, what: str) -> None:
    """Relative in the norm: a rounding to bf16 that falls the other way is one element among many."""
    assert got.isfinite().all(), what
    error = ((got.double() - want.double()).norm() / want.double().norm()).item()
    assert error < bound, f"{what}: {error:.2e}, allowed {bound:.0e}"


def check(given: dict[str, Any], variant: str | None = None, **options: Any) -> None:
    """Equal to the chain; what belongs to nobody is untouched; no slot is zero."""
    got, want = fresh_pools(given), fresh_pools(given)
    pool = given["state"].shape[0]
    dead = (given["slots"] < 0) | (given["slots"] >= pool)
    want["slots"] = torch.where(dead, -1, given["slots"])
    y, expected = run(got, variant, **options), reference(**want)
    what = f"{variant} {list(given['state'].shape)} {len(given['slots'])}"
    KDA_STEP.equality.check(y, expected, what)
    assert not y[dead.repeat_interleave(y.shape[0] // len(dead))].any(), what
    live = given["slots"][~dead]
    if len(live):
        close(y, expected, 4e-3, f"{what} y")
        # one step of a bf16 state; or a conv output that rounds the other way
        close(got["state"][live], want["state"][live], 4e-3 if given["state"].itemsize == 2 else 2e-4, f"{what} state")
    assert torch.equal(got["conv_pool"], want["conv_pool"]), what
    others = torch.ones(pool, dtype=torch.bool, device="cuda")
    others[live] = False
    assert torch.equal(got["state"][others], given["state"][others]), what


@STATES
@BOUNDS
def test_every_head_count_with_padded_pitch_strided_slots_and_rows_without_slot(state_dtype, bound):
    """Checks 8, 24, 26, 28, 34, 42."""
    for heads in range(3, 97):
        given = inputs(4, heads, state_dtype=state_dtype, bound=bound, gap=1, seed=heads)
        wide = torch.full((4, 3), 99, device="cuda")
        wide[:, 0] = given["slots"]
        wide[1, 0], wide[2, 0] = -1, 7
        given["slots"] = wide[:, 0]
        given["qkv"][1:3] = float("nan")
        check(given)


@STATES
@BOUNDS
@pytest.mark.parametrize("heads", [3, 6, 12, 24, 32, 48, 96])
def test_batches(heads, state_dtype, bound):
    for requests in (1, 2, 3, 7, 8, 16, 33, 64, 127, 191):
        check(inputs(requests, heads, state_dtype=state_dtype, bound=bound, seed=requests))


@pytest.mark.parametrize("family", families().values(), ids=lambda names: names[0])
@pytest.mark.parametrize("requests", [1, 64, 191, 192])
def test_all_variants_are_bit_equal_run_after_run(family, requests):
    """Checks 41, 46: 20 runs each on copies of one state, several waves of CTAs."""
    given, first = inputs(requests, 12, **kinds(family[0])), None
    for variant in family:
        for _ in range(20):
            got = fresh_pools(given)
            y = run(got, variant)
            first = first or (y, got)
            assert torch.equal(y, first[0]), variant
            assert torch.equal(got["state"], first[1]["state"]), variant
            assert torch.equal(got["conv_pool"], first[1]["conv_pool"]), variant


@pytest.mark.parametrize("variant", list(cuda.variants()))
def test_every_variant_equals_the_chain(variant):
    for requests, heads, bound in ((9, 12, -5.0), (2, 3, None), (5, 96, -5.0)):
        given = inputs(requests, heads, bound=bound, gap=2, **kinds(variant))
        given["slots"][requests // 2] = -1
        check(given, variant)


@pytest.mark.parametrize(("requests", "heads"), [(1, 12), (8, 12), (8, 32), (200, 12)])
@pytest.mark.parametrize("f_b", [False, True])
def test_graph_replay_with_changed_inputs_and_slots(requests, heads, f_b):
    """Checks 19, 29, 30: fresh memory is poisoned inside the capture, so an unwritten output would be NaN."""
    given = inputs(requests, heads, f_b=f_b)
    given |= {name: given[name].clone() for name in NAMES}
    run(fresh_pools(given))
    live, plain = fresh_pools(given), fresh_pools(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(live, early=True)
    for step in range(4):
        for name in NAMES:
            given[name].copy_(given[name].flip(0) * 0.9)
        given["slots"].copy_(given["slots"].roll(1))
        if step == 2:
            given["slots"][0] = -1
        graph.replay()
        want = run(plain, chained=False, variant=cuda.choose(requests * heads, torch.float32, f_b).variant)
        assert y.isfinite().all()
        assert torch.equal(y, want)
        assert torch.equal(live["state"], plain["state"])
        assert torch.equal(live["conv_pool"], plain["conv_pool"])


def captured(work: Callable[[], None]) -> None:
    """Replay `work` once; whatever it launches was launched before, for nothing may be loaded under capture."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.parametrize("requests", [1, 8, 22, 200])
def test_a_chain_of_layers_is_bit_equal_to_plain_launches(requests, monkeypatch):
    """Eight layers, six steps; forget and gate of a layer are the layer before's output, nothing lies in between."""
    monkeypatch.setattr(torch, "empty", torch._C._VariableFunctions.empty)  # poisoning would be a launch in between
    layers = [inputs(requests, 12, seed=layer) for layer in range(8)]

    def steps(variant: str, early: bool, **plan: Any) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
        pools, outputs = [fresh_pools(layer) for layer in layers], []

        def work() -> None:
            y = layers[0]["forget"]
            for _ in range(6):
                y = y.clone()  # a plain launch, behind the last write to every layer's pools
                for layer in pools:
                    y = run(layer | {"forget": y, "gate": y}, variant, early, **plan)
                outputs.append(y)

        captured(work)
        return outputs, pools

    for variant in families()[tuple(kinds("f32_s1").items())]:
        run(fresh_pools(layers[0]), variant)
        want, pools = steps(variant, False, chained=False)
        for early, release in ((False, cuda.Release.BEHIND_WAIT), *((True, when) for when in cuda.Release)):
            got, own = steps(variant, early, release=release)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (variant, early, release)
            for a, b in zip(own, pools, strict=True):
                assert torch.equal(a["state"], b["state"]), (variant, early, release)
                assert torch.equal(a["conv_pool"], b["conv_pool"]), (variant, early, release)


@pytest.mark.parametrize("requests", [1, 32])
def test_early_reads_behind_a_norm_and_a_projection_see_every_slot_copy(requests, monkeypatch):
    """The engine's order: copy of a slot, norm, projection, step; then the output's projection back into the stream."""
    monkeypatch.setattr(torch, "empty", torch._C._VariableFunctions.empty)
    heads, hidden = 12, 1024
    layers = [inputs(requests, heads, seed=layer) for layer in range(4)]
    make = torch.Generator("cuda").manual_seed(1)
    up = [torch.randn(5 * heads * D + heads, hidden, generator=make, device="cuda").bfloat16() * 0.03 for _ in layers]
    down = [torch.randn(hidden, heads * D, generator=make, device="cuda").bfloat16() * 0.03 for _ in layers]
    weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    start = torch.randn(requests, hidden, generator=make, device="cuda").bfloat16()

    def outputs(early: bool) -> list[torch.Tensor]:
        pools, results = [fresh_pools(layer) for layer in layers], []

        def work() -> None:
            x = start
            for step in range(6):
                for layer in pools:
                    at = step % requests
                    source, target = layer["slots"][:1], layer["slots"][at : at + 1]
                    layer["state"][target] = layer["state"][source] * 0.5
                    layer["conv_pool"][target] = layer["conv_pool"][source]
                for layer, a, b in zip(pools, up, down, strict=True):
                    width = heads * D
                    out = torch.nn.functional.linear(rms_norm(x, weight, 1e-5), a)
                    qkv, forget, gate, beta = out.split([3 * width, width, width, heads], -1)
                    given = layer | {"qkv": qkv, "forget": forget, "gate": gate, "beta_logits": beta}
                    plan = {} if early else {"chained": False}
                    variant = cuda.choose(requests * heads, torch.float32).variant
                    x = x + torch.nn.functional.linear(run(given, variant, early, **plan), b)
                results.append(x)

        captured(work)
        return results

    product = torch.nn.functional.linear(rms_norm(start, weight, 1e-5), up[0])
    torch.nn.functional.linear(product[:, : heads * D], down[0])
    run(fresh_pools(layers[0]))
    want = outputs(False)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(outputs(True), want, strict=True))
    assert all(x.isfinite().all() for x in want)


@STATES
@pytest.mark.parametrize("requests", [1, 16])
@pytest.mark.parametrize("tokens", [2, 5, 8])
def test_several_tokens_are_as_many_steps_and_every_state_can_be_kept(state_dtype, requests, tokens):
    """Check 36: after any accepted length the kept slot holds what sequential decoding would."""
    given = inputs(requests, 12, tokens=tokens, state_dtype=state_dtype, spare=requests * tokens + 1)
    free = [s for s in range(given["state"].shape[0]) if s not in set(given["slots"].tolist())]
    keep = torch.tensor(free[: requests * tokens], device="cuda").view(requests, tokens)
    keep[0, 0] = -1
    got, steps = fresh_pools(given | {"keep": keep}), fresh_pools(given)
    y = run(got).unflatten(0, (requests, tokens))
    for token in range(tokens):
        step = steps | {name: given[name][token::tokens] for name in NAMES}
        assert torch.equal(run(step), y[:, token]), token
        rows = keep[:, token] >= 0
        for pool in ("state", "conv_pool"):
            assert torch.equal(got[pool][keep[rows, token]], steps[pool][given["slots"][rows]]), (token, pool)
    assert torch.equal(got["state"][given["slots"]], given["state"][given["slots"]])


@pytest.mark.parametrize("requests", [2, 30, 100])
def test_a_sick_request_changes_no_bit_of_the_others(requests):
    """Check 31."""
    given = inputs(requests, 12)
    sick = fresh_pools(given) | {"qkv": given["qkv"].clone(), "gate": given["gate"].clone()}
    sick["qkv"][1], sick["gate"][1] = float("nan"), float("inf")
    sick["state"][given["slots"][1]] = float("inf")
    well = fresh_pools(given)
    y, want = run(sick), run(well)
    others = [i for i in range(requests) if i != 1]
    assert y[1].isnan().any()
    assert torch.equal(y[others], want[others])
    assert torch.equal(sick["state"][given["slots"][others]], well["state"][given["slots"][others]])
    alone = fresh_pools(given)
    assert torch.equal(run(rows_of(alone, 0, 1))[0], want[0])


@BOUNDS
@pytest.mark.parametrize("requests", [2, 20])
def test_4096_steps_stay_beside_the_fp64_definition(bound, requests):
    """Both plans of small batches; the largest error seen on the way is held, not only the last."""
    given = inputs(requests, 3, bound=bound, spare=0)
    state, window = given["state"].double()[given["slots"]], given["conv_pool"][given["slots"]]
    make = torch.Generator("cuda").manual_seed(9)
    tokens = {n: torch.randn(64, *given[n].shape, generator=make, device="cuda").bfloat16() for n in NAMES}
    for step in range(4096):
        given |= {name: t[step * 7 % 64] for name, t in tokens.items()}
        y = run(given, early=True)
        want, window, state = exact_step(given, window, state)
        if step % 256 == 255:
            close(y, want, 6e-3, f"y after {step + 1}")
            close(given["state"][given["slots"]], state, 2e-3, f"state after {step + 1}")
    assert torch.equal(given["conv_pool"][given["slots"]], window)


@pytest.mark.parametrize("requests", [2, 16])
def test_1024_steps_with_f_b_inside_stay_beside_a_library_product(requests):
    """Check 43: the class is an fp32 sum rounded to bf16 once; state drift against cuBLAS in front is bounded."""
    inside = inputs(requests, 12, f_b=True)
    outside = fresh_pools({name: t for name, t in inside.items() if name != "f_b"})
    make = torch.Generator("cuda").manual_seed(9)
    tokens = {n: torch.randn(64, *inside[n].shape, generator=make, device="cuda").bfloat16() for n in NAMES}
    for step in range(1024):
        now = {name: t[step % 64] for name, t in tokens.items()}
        y = run(inside | now)
        want = run(outside | now | {"forget": torch.nn.functional.linear(now["forget"], inside["f_b"])})
    KDA_STEP.equality.check(y, want, "y")
    close(inside["state"], outside["state"], 1e-3, "state")


def test_pools_beyond_2_31_elements():
    """Check 27."""
    heads, slots = 96, 1400
    given = inputs(2, heads)
    far = torch.zeros(slots, heads, D, D, device="cuda")
    history = torch.zeros(slots, 3, 3 * heads * D, dtype=torch.bfloat16, device="cuda")
    near = fresh_pools(given)
    at = torch.tensor([slots - 1, slots - 2], device="cuda")
    far[at], history[at] = given["state"][given["slots"]], given["conv_pool"][given["slots"]]
    got = given | {"state": far, "conv_pool": history, "slots": at}
    assert torch.equal(run(got), run(near))
    assert torch.equal(far[at], near["state"][given["slots"]])
    assert torch.equal(history[at], near["conv_pool"][given["slots"]])
    assert not far[: slots - 2].any()


def test_both_models_choose_it(real_kl, real_k3):
    for config in (real_kl, real_k3):
        assert select(config, torch.device("cuda")).chosen["kda_step"] == ("cuda", "first that fits")
        assert select(config, torch.device("cuda"), deterministic=True).chosen["kda_step"][0] == "chain"
