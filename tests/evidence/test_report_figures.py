"""Figures and scales: what people read is what was measured."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.evidence.report.axes import scale, tick_text
from anabranch.evidence.report.figures import SHOWN_OF_LIST, figure, percent, plain_rows, us


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (42167.15, "42,167"), (3055.28, "3,055.3"), (95.16, "95.160"), (0.4, "0.4"), (0.000123456, "0.00012346"),
        (-2.5, "-2.5000"), (0.0, "0"), (0, "0"), (1104, "1,104"), (1e9, "1,000,000,000"), (None, "-"),
        (math.nan, "-"), (math.inf, "-"), (True, "True"), ("words", "words"),
    ],
)  # fmt: skip
def test_figures_have_five_digits_and_no_exponent(value, text):
    assert figure(value) == text


def test_changes_and_times():
    assert (percent(1.0327), percent(0.98), percent(math.nan)) == ("+3.27 %", "-2.00 %", "-")
    assert (us(1_977_695), us(0), us(None)) == ("1,977.695", "0.000", "-")


def test_a_document_becomes_rows_and_says_what_it_leaves_out():
    rows = plain_rows({"a": {"b": [1, 2], "c": []}, "d": [{"e": True}] * 50, "f": list(range(50)), "g": None})
    found = dict(rows)
    assert found["a / b"] == "1, 2"
    assert found["a / c"] == "none"
    assert found["d[0] / e"] is True
    assert found["d"] == f"50 entries, the first {SHOWN_OF_LIST} are shown"
    assert f"d[{SHOWN_OF_LIST}] / e" not in found
    assert found["f"].endswith("39 ... (50 in all)")
    assert found["g"] is None


@given(st.lists(st.floats(-1e7, 1e7).filter(lambda v: v == 0 or abs(v) > 1e-6), min_size=1, max_size=20), st.booleans())
def test_a_scale_holds_all_values_with_distinct_readable_ticks(values, zero):
    made = scale(values, 10, 350, zero=zero)
    assert all(10 - 1e-6 <= made(value) <= 350 + 1e-6 for value in values)
    ticks = made.ticks(5)
    assert 2 <= len(ticks) <= 14
    step = ticks[1] - ticks[0]
    texts = [tick_text(tick, step) for tick in ticks]
    assert len(set(texts)) == len(texts)
    for tick, text in zip(ticks, texts, strict=True):
        assert float(text.replace(",", "")) == pytest.approx(tick, abs=step * 0.01)
