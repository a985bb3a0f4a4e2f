"""The adapter of FlashKDA against a stand-in that keeps the package's published contract."""

import sys
from importlib import import_module, reload
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.kda_prefill import error, fresh, prompt_inputs

from anabranch.ops.kda_prefill import reference
from anabranch.ops.kda_prefill.spec import KDA_PROMPT
from anabranch.ops.segments import Segments

pytest.importorskip("triton")


def fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float,
    initial_state: torch.Tensor | None = None,
    final_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> None:
    """As the README has it: dense bf16 rows [1, T, H, D], states [N, H, V, K], out and final_state written."""
    assert initial_state is not None
    assert final_state is not None
    assert cu_seqlens is not None
    lengths = cu_seqlens.diff().tolist()
    rows = (1, sum(lengths), len(A_log), 128)
    for t in (q, k, v, g, out):
        assert (t.shape, t.dtype, t.is_contiguous()) == (rows, torch.bfloat16, True)
    assert (beta.shape, beta.dtype, beta.is_contiguous()) == (rows[:3], torch.bfloat16, True)
    assert (dt_bias.shape, dt_bias.dtype, A_log.dtype) == (rows[2:], torch.float32, torch.float32)
    assert (cu_seqlens.dtype, scale, -5 <= lower_bound <= 0) == (torch.int64, 128**-0.5, True)
    for t in (initial_state, final_state):
        assert (t.shape, t.is_contiguous()) == ((len(lengths), rows[2], 128, 128), True)
    assert initial_state.dtype == final_state.dtype
    final_state.copy_(initial_state)
    given: Any = (g[0], beta[0], dt_bias.flatten(), A_log, lower_bound, None, Segments.of(lengths))
    out[0] = reference.kda_prompt(q[0], k[0], v[0], *given, torch.arange(len(lengths)), final_state)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The adapter over the stand-in."""
    package = ModuleType("flash_kda")
    package.fwd = fwd  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "flash_kda", package)
    name = "anabranch.ops.kda_prefill.flash"
    return reload(sys.modules[name]) if name in sys.modules else import_module(name)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dead", [(), (1,), (0, 1, 2)])
def test_slots_become_dense_states_and_come_back(flash, state_dtype, dead):
    given = prompt_inputs([5, 17, 3], 2, state_dtype=state_dtype, padding=4)
    given["slots"][list(dead)] = -1
    before, want = given["state"].clone(), fresh(given)
    got = flash.kda_prompt(**given)
    KDA_PROMPT.equality.check(got[:25], reference.kda_prompt(**want)[:25], "o")
    assert not got[25:].any()
    live = given["slots"][given["slots"] >= 0].tolist()
    idle = [s for s in range(len(before)) if s not in live]
    assert torch.equal(given["state"][idle], before[idle])
    if live:
        assert error(given["state"][live], want["state"][live]) < 1e-6


def test_what_the_package_has_not(flash):
    given = prompt_inputs([5], 1, "softplus")
    with pytest.raises(ValueError, match=r"takes a bounded gate .* given is lower_bound=None"):
        flash.kda_prompt(**given)
    with pytest.raises(ValueError, match="given is saves"):
        flash.kda_prompt(**given | {"lower_bound": -5.0, "saves": torch.tensor([0])})
