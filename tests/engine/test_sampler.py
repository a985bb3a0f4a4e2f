"""Sampling: greedy, cuts, seeds, and what is reported about a choice."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anabranch.engine.sampler import sample
from anabranch.engine.sampling import SamplingParams
from anabranch.ops.log_softmax.reference import log_softmax, pick

OPS: Any = SimpleNamespace(log_softmax=log_softmax, pick=pick)


@dataclass
class Row:
    """As much of a request as sampling looks at."""

    params: SamplingParams
    generator: torch.Generator = field(default_factory=torch.Generator)
    banned: tuple[int, ...] = ()
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)


def choose(logits: torch.Tensor, *rows: Row):
    return sample(logits, rows, OPS).read()


LOGITS = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))


def draws(count: int = 400, **params) -> list[int]:
    row = Row(SamplingParams(**params), torch.Generator().manual_seed(0))
    return [choose(LOGITS, row)[0].token for _ in range(count)]


def test_greedy_takes_the_largest():
    assert set(draws(20, temperature=0.0)) == {0}


def test_frequencies_follow_the_distribution():
    seen = draws(4000)
    for token, p in enumerate((0.5, 0.3, 0.15, 0.05)):
        assert abs(seen.count(token) / 4000 - p) < 0.03


def test_temperature_flattens():
    hot = draws(2000, temperature=10.0)
    assert hot.count(3) / 2000 > 0.15


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": -1}, {0, 1, 2, 3}),
        ({"top_p": 0.79}, {0, 1}),
        ({"top_p": 0.81}, {0, 1, 2}),
        ({"top_p": 1e-9}, {0}),
        ({"min_p": 0.2}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.5}, {0}),
    ],
)
def test_cuts_keep_exactly(params, kept):
    assert set(draws(**params)) == kept


def test_a_seed_repeats_whatever_the_batch():
    torch.manual_seed(0)
    logits = torch.randn(3, 50)
    p = SamplingParams(seed=7)

    def run(rows):
        drawers = [Row(p, torch.Generator().manual_seed(7 if r == 1 else r)) for r in rows]
        return [choose(logits[rows], *drawers)[rows.index(1)].token for _ in range(9)]

    assert run([1]) == run([0, 1, 2]) == run([2, 1])


def test_a_row_draws_alike_beside_rows_that_are_cut():
    torch.manual_seed(1)
    logits = torch.randn(3, 50)

    def run(rows, neighbours):
        drawers = [
            Row(SamplingParams(**({"temperature": 1.5} if r == 0 else neighbours)), torch.Generator().manual_seed(r))
            for r in rows
        ]
        return [choose(logits[rows], *drawers)[0].token for _ in range(30)]

    alone = run([0], {})
    assert len(set(alone)) > 5
    assert run([0, 1, 2], {"top_p": 0.5}) == run([0, 2], {"top_k": 3, "temperature": 0.3}) == alone


def test_banned_ids_are_never_chosen_and_logprobs_stay_raw():
    out = choose(LOGITS, Row(SamplingParams(temperature=0.0, logprobs=2), banned=(0,)))[0]
    assert out.token == 1
    assert out.logprob == pytest.approx(torch.log(torch.tensor(0.3)).item(), rel=1e-5)
    assert list(out.top) == [0, 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_logit_gives_no_sample_and_leaves_other_rows_alone(value):
    bad = torch.stack([LOGITS[0], LOGITS[0].clone()])
    bad[1, 3] = value
    rows = [Row(SamplingParams(), torch.Generator().manual_seed(3)) for _ in range(2)]
    alone = choose(LOGITS, Row(SamplingParams(), torch.Generator().manual_seed(3)))[0]
    assert choose(bad, *rows) == [alone, None]


def test_penalties_and_bias():
    def greedy(prompt=(), output=(), **params):
        row = Row(SamplingParams(temperature=0.0, **params), prompt=list(prompt), output=list(output))
        return choose(LOGITS, row)[0].token

    assert greedy(output=[0], presence_penalty=0.4) == 0
    assert greedy(output=[0], presence_penalty=0.6) == 1
    assert greedy(output=[0, 0, 0], frequency_penalty=0.2) == 1
    assert greedy(prompt=[0, 0, 0], frequency_penalty=2.0) == 0
    assert greedy(prompt=[0], repetition_penalty=2.0) == 1
    assert greedy(logit_bias={3: 100.0}) == 3
    assert greedy(logit_bias={0: -100.0}) == 1


def test_one_rows_penalties_do_not_touch_another():
    heavy = Row(SamplingParams(temperature=0.0, logit_bias={0: -100.0}))
    plain = Row(SamplingParams(temperature=0.0))
    assert [s.token for s in choose(LOGITS.repeat(2, 1), heavy, plain)] == [1, 0]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1: need 0"),
        ({"top_p": 0.0}, "top_p=0.0: need"),
        ({"top_p": 1.5}, "top_p=1.5: need"),
        ({"top_k": -2}, "top_k=-2: need"),
        ({"max_tokens": 0}, "max_tokens=0: need at least 1"),
        ({"min_tokens": 17}, "min_tokens=17: need"),
        ({"stop": ("",)}, "stop="),
        ({"logprobs": 21}, "logprobs=21: need"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"presence_penalty": 2.1}, "presence_penalty=2.1: need"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: need"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias="),
    ],
)
def test_wrong_values_are_named(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


def test_a_single_stop_string_is_accepted():
    assert SamplingParams(stop="x").stop == ("x",)
