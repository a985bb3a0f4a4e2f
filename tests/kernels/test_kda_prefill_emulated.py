"""The CUDA prefill on a CPU, through its real entry points: threads in a random order, TMA and products late.

In the interpreter's process, because its Python side imports the Triton kernels.
"""

from typing import Any

import pytest
import torch
from helpers import emulated
from helpers.kda_prefill import error, exact_prompt, fresh, prompt_inputs, rows_of

from anabranch.ops.kda_prefill import chunked, cuda, reference
from anabranch.ops.kda_prefill.chunked import BOUNDED, SOFTPLUS
from anabranch.ops.kda_prefill.spec import EQUAL_KEY_ERRORS, KDA_PROMPT, RANDOM_ERRORS

if why := emulated.why_not():
    pytest.skip(why, allow_module_level=True)

GATES = pytest.mark.parametrize("gate", ["bounded", "softplus"])


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    return emulated.loaded(monkeypatch, "kda_prefill")


def run(given: dict[str, Any]) -> torch.Tensor:
    return cuda.kda_prompt(**given)


@GATES
@pytest.mark.parametrize("near", [None, 1e-2])
def test_errors_against_fp64(gate, near):
    """Outputs are rounded to bf16 besides."""
    given = prompt_inputs([201], 1, gate, near=near)
    want, want_state = exact_prompt(given)
    got = run(given)
    bounds = RANDOM_ERRORS if near is None else EQUAL_KEY_ERRORS
    assert error(got, want) < bounds[0]
    assert error(given["state"][given["slots"]], want_state) < bounds[1]


@GATES
def test_tiles_are_rounded_once_and_the_inverse_hardly_errs(gate):
    """What one kernel hands the other, against formulas in fp64; a token behind the last one counts as none."""
    given = prompt_inputs([91], 1, gate)
    call = cuda.Prefill(given["v"], given["v"].clone(), given["segments"], given["slots"], given["state"])
    weights = (given["dt_bias"], given["a_log"], *((BOUNDED, -5.0) if gate == "bounded" else (SOFTPLUS, 0.0)))
    call.prepare(*(given[name] for name in ("q", "k", "forget", "beta_logits")), *weights)
    want, width = _tiles(given), 64 * 128
    for n in range(2):
        parts = call.tiles[n, 0].split([width, width, width, 64 * 64, 64 * 64])
        for name, part, least in zip(("Kd", "Qd", "Kg", "T", "R"), parts, (2e-3, 2e-3, 2e-3, 2e-4, 2e-3), strict=True):
            assert error(part, want[name][n].flatten()) < least, (name, n)
        assert error(call.scales[n, 0, :128], want["dec"][n]) < 1e-5
        assert error(call.scales[n, 0, 128:], want["beta"][n]) < 1e-6


def _tiles(given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Kd, Qd, Kg [N, 64, D], T, R [N, 64, 64], dec [N, D] and beta [N, 64] of the first head in fp64."""

    def chunks(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 64)).unflatten(0, (-1, 64))

    def unit(x: torch.Tensor) -> torch.Tensor:
        return chunks(x[:, 0].double() / (x[:, 0].double().square().sum(-1, keepdim=True) + 1e-6).sqrt())

    zeta = given["forget"][:, 0].double() + given["dt_bias"].double()
    rate, bound = given["a_log"].double().exp(), given["lower_bound"]
    g = -rate * torch.nn.functional.softplus(zeta) if bound is None else bound * (rate * zeta).sigmoid()
    q, k, G = unit(given["q"]) * 128**-0.5, unit(given["k"]), chunks(g).cumsum(1)
    beta = chunks(given["beta_logits"].double().sigmoid())[..., 0]
    causal = torch.ones(64, 64, dtype=torch.bool).tril()[..., None]
    E = torch.where(causal, G[:, :, None] - G[:, None], -torch.inf).exp()
    A = torch.einsum("nid,njd,nijd->nij", k, k, E).tril(-1) * beta[..., None]
    return {
        "Kd": k * G.exp(),
        "Qd": q * G.exp(),
        "Kg": k * (G[:, -1:] - G).exp(),
        "T": torch.linalg.inv(torch.eye(64, dtype=torch.float64) + A),
        "R": torch.einsum("nid,njd,nijd->nij", q, k, E),
        "dec": G[:, -1].exp(),
        "beta": beta,
    }


def test_a_gate_that_forgets_all_at_once_leaves_no_trace():
    given = prompt_inputs([130], 1, "softplus")
    given["forget"][::3], given["forget"][1::3] = 300.0, -30.0
    given["a_log"].fill_(3.0)
    want, want_state = exact_prompt(given)
    assert error(run(given), want) < RANDOM_ERRORS[0]
    assert error(given["state"][given["slots"]], want_state) < RANDOM_ERRORS[1]


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_ragged_batch(state_dtype):
    """Segments of any length, one without a slot that holds NaN, padding that holds NaN; each as if it were alone."""
    lengths = [1, 65, 0, 64, 70]
    given = prompt_inputs(lengths, 2, padding=5, state_dtype=state_dtype)
    given["slots"][3] = -1
    before = fresh(given)
    for name in ("q", "k", "v", "forget"):
        given[name][66:130] = float("nan")
    got = run(given)[: sum(lengths)]
    assert not got[66:130].any()
    want = fresh(before)
    KDA_PROMPT.equality.check(got, reference.kda_prompt(**want)[: sum(lengths)], "o")
    live = given["slots"][given["slots"] >= 0]
    assert error(given["state"][live], want["state"][live]) < RANDOM_ERRORS[1]
    idle = [s for s in range(len(given["state"])) if s not in live.tolist()]
    assert torch.equal(given["state"][idle], before["state"][idle])
    alone = fresh(rows_of(before, 130, 200, int(given["slots"][4])))
    assert torch.equal(run(alone), got[130:])


def test_more_segments_than_are_looked_at_together():
    given = prompt_inputs([1, 2, 70] * 12, 1)
    want = fresh(given)
    KDA_PROMPT.equality.check(run(given), reference.kda_prompt(**want), "o")
    assert error(given["state"], want["state"]) < RANDOM_ERRORS[1]


def test_cuts_at_chunk_ends_and_saved_states_are_bits_of_the_whole():
    given = prompt_inputs([200], 1, slots=6)
    given["slots"], given["saves"] = torch.tensor([4]), torch.tensor([-1, 2, -1, 3])
    whole, before = fresh(given), given["state"].clone()
    want = run(whole)
    assert torch.equal(whole["state"][3], whole["state"][4])
    assert torch.equal(whole["state"][[0, 1, 5]], before[[0, 1, 5]])
    part = fresh(given | {"saves": None})
    first = run(rows_of(part, 0, 128, 4))
    assert torch.equal(part["state"][4], whole["state"][2])
    assert torch.equal(torch.cat([first, run(rows_of(part, 128, 200, 4))]), want)
    assert torch.equal(part["state"][4], whole["state"][4])


def test_no_order_of_threads_shows_in_the_bits(module):
    given = prompt_inputs([330], 1)
    first = None
    for seed in range(4):
        module.seed(100 + seed)
        own = fresh(given)
        o = run(own)
        first = first or (o, own["state"])
        assert torch.equal(o, first[0])
        assert torch.equal(own["state"], first[1])


def test_either_kernel_follows_the_others(module):
    """The memory between the launches is laid out the same: the Triton chain reads what the CUDA kernel prepared."""

    class Mixed(cuda.Prefill):
        def chain(self) -> None:
            chunked.Prefill.chain(self)

    given = prompt_inputs([70], 2)
    other = fresh(given)
    KDA_PROMPT.equality.check(chunked.prompt(Mixed, **given), run(other))
    assert error(given["state"], other["state"]) < RANDOM_ERRORS[1]


def test_heads_in_turns_give_the_same_bits(monkeypatch):
    given = prompt_inputs([70, 3], 3)
    turns, want = fresh(given), run(fresh(given))
    monkeypatch.setattr(chunked, "SCRATCH", 1)
    monkeypatch.setattr(chunked, "SM_PAIRS", 1)
    assert len(chunked.turns(3, 128, given["segments"])) == 3
    assert torch.equal(run(turns), want)


WRONG = {
    r"q is torch.float32 \[70, 2, 128\], needs torch.bfloat16 \[70, 2, 128\]": lambda d: {"q": d["q"].float()},
    r"forget is torch.bfloat16 \[70, 2, 64\]": lambda d: {"forget": d["forget"][..., :64]},
    "beta_logits is torch.float32": lambda d: {"beta_logits": d["beta_logits"].float()},
    r"dt_bias is torch.float32 \[255\], needs torch.float32 \[256\]": lambda d: {"dt_bias": d["dt_bias"][:-1]},
    "state is torch.float16, needs float32 or bfloat16": lambda d: {"state": d["state"].half()},
    "state is .*, needs dense slots": lambda d: {"state": d["state"].transpose(2, 3)},
    r"slots is torch.int32 \[1\]": lambda d: {"slots": d["slots"].int()},
    r"saves is torch.int64 \[3\], needs torch.int64 \[2\]": lambda d: {"saves": torch.tensor([0, 1, -1])},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_the_kernels_were_not_made_for_is_refused(message):
    given = prompt_inputs([70], 2)
    with pytest.raises(ValueError, match=message):
        cuda.kda_prompt(**(given | WRONG[message](given)))


def test_no_token_is_no_launch():
    given = prompt_inputs([0], 2)
    before = given["state"].clone()
    assert cuda.kda_prompt(**given).shape == (0, 2, 128)
    assert torch.equal(given["state"], before)
