"""Sampling: greedy, cuts, seeds, and what is reported about a choice."""

import pytest
import torch

from anabranch.engine.sampler import sample
from anabranch.engine.sampling import SamplingParams

LOGITS = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))


def draws(count: int = 400, **params) -> list[int]:
    p = SamplingParams(**params)
    g = torch.Generator().manual_seed(0)
    return [sample(LOGITS, [p], [g], [[]])[0].token for _ in range(count)]


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
        gens = [torch.Generator().manual_seed(7 if r == 1 else r) for r in rows]
        return [sample(logits[rows], [p] * len(rows), gens, [[]] * len(rows))[rows.index(1)].token for _ in range(9)]

    assert run([1]) == run([0, 1, 2]) == run([2, 1])


def test_banned_ids_are_never_chosen_and_logprobs_stay_raw():
    out = sample(LOGITS, [SamplingParams(temperature=0.0, logprobs=2)], [torch.Generator()], [[0]])[0]
    assert out.token == 1
    assert out.logprob == pytest.approx(torch.log(torch.tensor(0.3)).item(), rel=1e-5)
    assert list(out.top) == [0, 1]


def test_a_non_finite_logit_is_an_error():
    bad = torch.stack([LOGITS[0], torch.full((4,), float("nan"))])
    with pytest.raises(FloatingPointError, match="row 1 of 2"):
        sample(bad, [SamplingParams()] * 2, [torch.Generator()] * 2, [[], []])


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
    ],
)
def test_wrong_values_are_named(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


def test_a_single_stop_string_is_accepted():
    assert SamplingParams(stop="x").stop == ("x",)
