"""Figures as people read them."""

from collections.abc import Iterator, Mapping
from itertools import islice
from math import floor, isfinite, log10
from typing import Any

SHOWN_OF_LIST = 40


def figure(value: Any, digits: int = 5) -> str:
    """At most `digits` significant digits, thousands with commas, never an exponent below 1e15; "-" for no figure."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-" if value is None else str(value)
    if not isfinite(value):
        return "-"
    if isinstance(value, int) or value == 0:
        return f"{value:,}" if value else "0"
    decimals = max(0, digits - 1 - floor(log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0") if abs(value) < 1 else text


def percent(ratio: float) -> str:
    """A ratio as a signed change: 1.0327 is "+3.27 %"."""
    return f"{(ratio - 1) * 100:+.2f} %" if isfinite(ratio) else "-"


def us(nanoseconds: float | None) -> str:
    """Microseconds to the nanosecond."""
    return "-" if nanoseconds is None else f"{nanoseconds / 1e3:,.3f}"


def signed(value: Any) -> str:
    """A leaf of a document as text: words as they are, figures readable, truth as yes or no."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.6g}" if isinstance(value, float) else "-" if value is None else str(value)


def plain_rows(document: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Every leaf with its path; a long list shows its beginning and says how long it is."""
    return list(_leaves("", document))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{path} / {key}" if path else str(key), item)
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping | list | tuple) for item in value):
        for index, item in enumerate(islice(value, SHOWN_OF_LIST)):
            yield from _leaves(f"{path}[{index}]", item)
        if len(value) > SHOWN_OF_LIST:
            yield path, f"{len(value)} entries, the first {SHOWN_OF_LIST} are shown"
    elif isinstance(value, list | tuple):
        text = ", ".join(signed(item) for item in value[:SHOWN_OF_LIST])
        more = f" ... ({len(value)} in all)" if len(value) > SHOWN_OF_LIST else ""
        yield path, f"{text}{more}" or "none"
    else:
        yield path, value
