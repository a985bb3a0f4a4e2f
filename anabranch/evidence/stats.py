"""Whether two arms differ: paired ratios, the spread of an arm against itself, and an interval from both."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise


@dataclass(frozen=True)
class Verdict:
    """The outcome for one metric. Ratios are B over A; `spread_pct` is the largest difference of A from itself."""

    ratio: float
    low: float
    high: float
    verdict: str
    smallest_effect_pct: float
    spread_pct: float
    pairs: list[float] = field(default_factory=list)


def judge(
    pairs: Sequence[tuple[float, float]],
    control: Sequence[tuple[float, float]],
    better: str,
    confidence: float = 0.99,
    compared: int = 1,
) -> Verdict:
    """Compare B with A from adjacent pairs (a, b), with pairs (a, a) of the same arm as the control.

    The logarithm of a pair's ratio scatters alike whether the pair is A/B or A/A, so that both estimate the scatter:
    A/B pairs around their mean, A/A pairs around none. The interval is Student's, at `confidence` for all `compared`
    metrics together (Bonferroni). A difference counts if the interval excludes 1 and the ratio lies further from 1 than
    A ever lay from itself, in the control or from one pair to the next. One A/B pair gives no verdict: it is a
    screening, and without a control its interval is NaN.

    Raises:
        ValueError: no pair, or a figure that is not positive.
    """
    if not pairs:
        raise ValueError("no A/B pair: need at least one")
    ratios, own = _logs(pairs), _logs(control)
    repeats = _logs([(a, b) for (a, _), (b, _) in pairwise(pairs)])
    mean, freedom = sum(ratios) / len(ratios), len(ratios) - 1 + len(own)
    spread = max(map(abs, own + repeats), default=math.nan)
    half = smallest = math.nan
    if freedom:
        scatter = math.sqrt((sum((r - mean) ** 2 for r in ratios) + sum(r * r for r in own)) / freedom)
        error = scatter / math.sqrt(len(ratios))
        half = student_t(1 - (1 - confidence) / compared / 2, freedom) * error
        smallest = max(half + student_t(0.8, freedom) * error, spread)
    verdict = "screening" if len(pairs) == 1 else "no difference shown"
    if len(pairs) > 1 and abs(mean) > max(half, spread):
        verdict = "faster" if (mean > 0) == (better == "higher") else "slower"
    return Verdict(
        ratio=math.exp(mean),
        low=math.exp(mean - half),
        high=math.exp(mean + half),
        verdict=verdict,
        smallest_effect_pct=100 * math.expm1(smallest),
        spread_pct=100 * math.expm1(spread),
        pairs=[math.exp(r) for r in ratios],
    )


@cache
def student_t(probability: float, freedom: float) -> float:
    """The value that Student's t stays below with this probability (0 < p < 1)."""
    if probability < 0.5:
        return -student_t(1 - probability, freedom)
    low, high = 0.0, 1.0
    while student_t_below(high, freedom) < probability:
        high *= 2
    return _root(lambda t: student_t_below(t, freedom) - probability, low, high)


def student_t_below(t: float, freedom: float) -> float:
    """Probability that Student's t is at most `t`."""
    tail = 0.5 * _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))
    return 1 - tail if t > 0 else tail


def mcnemar(only_a: int, only_b: int) -> float:
    """Exact two-sided p of McNemar's test: how odd this split of the disagreements is, were both arms equally good."""
    total, fewer = only_a + only_b, min(only_a, only_b)
    if total == 0:
        return 1.0
    below = sum(math.comb(total, k) for k in range(fewer + 1))
    return min(1.0, 2 * below / 2**total)


def _logs(pairs: Sequence[tuple[float, float]]) -> list[float]:
    for pair in pairs:
        if not all(0 < value < math.inf for value in pair):
            raise ValueError(f"pair {pair}: need two positive figures")
    return [math.log(b / a) for a, b in pairs]


def _root(f: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) < 0 else (low, middle)
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function, by its continued fraction (Lentz)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    c, d, fraction = 1.0, 0.0, 1.0
    for i in range(400):
        m = i // 2
        if i == 0:
            step = 1.0
        elif i % 2 == 0:
            step = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            step = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / _away_from_zero(1 + step * d)
        c = _away_from_zero(1 + step / c)
        fraction *= c * d
        if abs(1 - c * d) < 1e-14:
            break
    return front * (fraction - 1)


def _away_from_zero(x: float) -> float:
    return x if abs(x) > 1e-300 else 1e-300
