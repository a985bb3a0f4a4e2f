"""The CPU's decode step against the chain of references: outputs, states, windows, and what it leaves alone."""

import pytest
import torch

from anabranch.ops.kda_step import cpu, reference
from anabranch.ops.kda_step.spec import KDA_STEP
from anabranch.ops.spec import tolerance

HEADS, DIM, RANK = 3, 6, 4
WIDTH = HEADS * DIM
STATES = tolerance(2e-6, 1.6e-2)


def inputs(requests: int, dtype: torch.dtype, state_dtype: torch.dtype) -> dict:
    """Arguments of a step over 7 slots; projections are columns of wider rows, and nobody's slot holds NaN."""
    rows = torch.randn(requests, 5 * WIDTH + HEADS + 5).to(dtype)
    qkv, forget, gate, beta, _ = rows.split([3 * WIDTH, WIDTH, WIDTH, HEADS, 5], -1)
    return {
        "qkv": qkv,
        "conv_pool": torch.randn(7, 3, 3 * WIDTH).to(dtype),
        "conv_weight": torch.randn(3 * WIDTH, 4),
        "forget": forget,
        "beta_logits": beta,
        "gate": gate,
        "dt_bias": torch.randn(WIDTH),
        "a_log": torch.randn(HEADS),
        "lower_bound": None,
        "norm_weight": torch.rand(DIM) + 0.5,
        "eps": 1e-5,
        "state": torch.randn(7, HEADS, DIM, DIM).to(state_dtype),
    }


def compare(given: dict, slots: list[int], **more) -> None:
    """Both steps on copies of the pools, whose other slots are poisoned."""
    given = given | {"slots": torch.tensor(slots)}
    idle = [slot for slot in range(7) if slot not in slots]
    given["conv_pool"][idle], given["state"][idle] = float("nan"), float("nan")
    copies = [given | {name: given[name].clone() for name in ("conv_pool", "state")} for _ in range(2)]
    y, want = (step(**copy, **more) for step, copy in zip((cpu.kda_step, reference.kda_step), copies, strict=True))
    KDA_STEP.equality.check(y, want)
    (pool, state), (wanted_pool, wanted) = ((copy["conv_pool"], copy["state"]) for copy in copies)
    assert torch.equal(pool.nan_to_num(), wanted_pool.nan_to_num())
    assert torch.equal(state.isnan(), wanted.isnan())
    STATES.check(state.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [[4], [5, 0, 3]])
def test_it_is_the_chain_of_references(slots, dtype, bound):
    torch.manual_seed(0)
    compare(inputs(len(slots), dtype, torch.float32) | {"lower_bound": bound}, slots)
    compare(inputs(len(slots), dtype, torch.bfloat16) | {"lower_bound": bound}, slots)


def test_what_it_was_not_made_for_goes_to_the_reference():
    torch.manual_seed(0)
    compare(inputs(3, torch.float32, torch.float32), [5, -1, 2])
    compare(inputs(4, torch.float32, torch.float32), [5, 2])  # two tokens of each
    given = inputs(2, torch.float32, torch.float32)
    compare(given | {"forget": torch.randn(2, RANK)}, [5, 2], f_b=torch.randn(WIDTH, RANK))
