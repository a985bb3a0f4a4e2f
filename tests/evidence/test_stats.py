"""Known numbers, rates of false verdicts, and the published figures from rows built to them."""

import math

import numpy as np
import pytest

from anabranch.evidence.metrics import measure, parse_goodput, span_s
from anabranch.evidence.record import RequestRow
from anabranch.evidence.stats import judge, mcnemar, student_t, student_t_below


@pytest.mark.parametrize(("p", "freedom", "value"), [
    (0.975, 1, 12.7062), (0.975, 2, 4.3027), (0.975, 4, 2.7764), (0.995, 4, 4.6041), (0.995, 10, 3.1693),
    (0.9, 5, 1.4759), (0.8, 3, 0.9785), (0.5, 7, 0.0), (0.025, 2, -4.3027), (0.99875, 4, 6.7583),
])  # fmt: skip
def test_quantiles_of_student(p, freedom, value):
    assert student_t(p, freedom) == pytest.approx(value, abs=2e-4)
    assert student_t_below(student_t(p, freedom), freedom) == pytest.approx(p, abs=1e-9)


@pytest.mark.parametrize(
    ("b", "c", "p"), [(0, 0, 1.0), (5, 5, 1.0), (0, 5, 0.0625), (10, 2, 0.038574), (1, 9, 0.021484)]
)
def test_mcnemar(b, c, p):
    assert mcnemar(b, c) == mcnemar(c, b) == pytest.approx(p, abs=1e-6)


def test_an_interval_by_hand():
    """Ratios of 1.02 and 1.06 and a control of 1.01: two degrees of freedom, worked out with a calculator."""
    found = judge([(100, 102), (100, 106)], [(100, 101)], "higher", confidence=0.95)
    logs, own = [math.log(1.02), math.log(1.06)], math.log(1.01)
    mean = sum(logs) / 2
    half = 4.302653 * math.sqrt((2 * (logs[0] - mean) ** 2 + own**2) / 2) / math.sqrt(2)
    assert found.ratio == pytest.approx(math.sqrt(1.02 * 1.06))
    assert (found.low, found.high) == pytest.approx((math.exp(mean - half), math.exp(mean + half)))
    assert found.spread_pct == pytest.approx(1.0)
    assert found.verdict == "no difference shown"
    assert found.smallest_effect_pct > 100 * math.expm1(half)


def test_which_way_is_better():
    control = [(100, 100.1), (100, 99.9)]
    assert judge([(100, 120)] * 3, control, "higher").verdict == "faster"
    assert judge([(100, 120)] * 3, control, "lower").verdict == "slower"
    assert judge([(100, 80)] * 3, control, "lower").verdict == "faster"


def test_a_difference_inside_the_spread_of_a_is_none():
    """Pairs that agree perfectly, while A itself moves by 5 % from one pair to the next."""
    pairs = [(100, 103), (105, 108.15), (100, 103)]
    assert judge(pairs, [], "higher").verdict == "no difference shown"
    assert judge([(100, 103)] * 3, [], "higher").verdict == "faster"


def test_a_single_pair_is_a_screening():
    found = judge([(100, 200)], [], "higher")
    assert found.verdict == "screening"
    assert math.isnan(found.low)
    assert math.isnan(found.spread_pct)
    assert judge([(100, 200)], [(100, 101)], "higher").verdict == "screening"


def test_figures_that_cannot_be_compared():
    with pytest.raises(ValueError, match="positive"):
        judge([(0.0, 1.0)], [], "higher")
    with pytest.raises(ValueError, match="at least one"):
        judge([], [], "higher")


def verdicts(effect: float, seeds: int) -> list[list[str]]:
    """Verdicts on four metrics of simulated comparisons with 1 % of scatter from run to run."""
    found = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        noise = np.exp(rng.normal(0, 0.01, (4, 5, 2)))
        noise[:, 2:, 1] *= effect
        found.append([judge(each[2:], each[:2], "lower", compared=4).verdict for each in noise.tolist()])
    return found


def test_twenty_times_a_against_a():
    for block in range(5):
        runs = verdicts(1.0, 100)[20 * block : 20 * block + 20]
        assert sum(any(v != "no difference shown" for v in run) for run in runs) <= 1
    false = sum(any(v != "no difference shown" for v in run) for run in verdicts(1.0, 400))
    assert false <= 8  # 1 % are expected


def test_ten_percent_are_found():
    found = [v for run in verdicts(1.1, 50) for v in run]
    assert found.count("slower") >= 0.93 * len(found)  # 97 % are expected
    assert "faster" not in found


def rows(requests: int, tokens: int, duration: float, ttft: float, start: float = 0.0) -> list[RequestRow]:
    """Requests that follow one another evenly for `duration` seconds; one token comes out of each."""
    step = duration / requests
    return [
        RequestRow(
            index=i, start_s=start + i * step, first_s=start + i * step + ttft, end_s=start + (i + 1) * step,
            input_tokens=tokens, output_tokens=1, arrivals=[start + i * step + ttft], counts=[1],
        )
        for i in range(requests)
    ]  # fmt: skip


PUBLISHED = {"A1": 42203.78, "B1": 43569.94, "A2": 42130.58, "B2": 43524.13}


def test_the_published_pooled_gain_of_3_27_percent():
    """128 requests of 65,536 tokens a run; each run lasts as long as its published rate says."""
    tokens = 65536
    runs = {name: rows(128, tokens, 128 * tokens / rate, 6.0) for name, rate in PUBLISHED.items()}
    for name, rate in PUBLISHED.items():
        assert measure([runs[name]])["input_throughput"] == pytest.approx(rate)
    a, b = (measure([runs[arm + "1"], runs[arm + "2"]]) for arm in "AB")
    assert a["input_throughput"] == pytest.approx(42167.15, abs=0.01)
    assert b["input_throughput"] == pytest.approx(43547.02, abs=0.01)
    assert f"{100 * (b['input_throughput'] / a['input_throughput'] - 1):+.2f}" == "+3.27"
    found = judge([(PUBLISHED["A1"], PUBLISHED["B1"]), (PUBLISHED["A2"], PUBLISHED["B2"])], [], "higher")
    assert [f"{100 * (r - 1):+.2f}" for r in found.pairs] == ["+3.24", "+3.31"]
    assert a["median_tpot_ms"] is None


def test_pooling_is_not_averaging():
    """Nine slow seconds and one fast: the mean of the rates is 55 tok/s, all tokens over all time 19."""
    slow, fast = rows(9, 10, 9.0, 0.5), rows(10, 10, 1.0, 0.01)
    pooled = measure([slow, fast])
    assert pooled["input_throughput"] == pytest.approx(19.0)
    assert pooled["duration"] == pytest.approx(10.0)
    assert pooled["median_ttft_ms"] == pytest.approx(10.0)
    assert pooled["p99_ttft_ms"] == pytest.approx(500.0)


def test_failed_requests_count_apart():
    good = rows(4, 10, 4.0, 0.5)
    good[1].error = "status 500"
    figures = measure([good], goodput=parse_goodput(["ttft:501", "e2el:2000"]))
    assert (figures["completed"], figures["failed"], figures["total_input_tokens"]) == (3, 1, 30)
    assert span_s(good) == figures["duration"] == 4.0
    assert figures["request_goodput"] == 0.75
    assert measure([good], goodput={"ttft": 499.0})["request_goodput"] == 0.0
    assert measure([[]])["completed"] == 0


@pytest.mark.parametrize("item", ["ttft", "itl:3", "ttft:x", "ttft:-1", "ttft:nan"])
def test_bad_goodput(item):
    with pytest.raises(ValueError, match="goodput"):
        parse_goodput([item])
