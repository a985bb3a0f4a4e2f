"""A server's own counters, before and after a load, and what they must have become."""

import operator
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anabranch.evidence.client import Client

# each server's name for work that a formal request must not have met
MUST_BE_ZERO = (
    "num_preemptions", "num_retracted_reqs", "num_retracted_requests", "nonfinite_logits", "corrupted_requests",
)  # fmt: skip
CACHE_HITS = ("prefix_cache_hits", "cached_tokens")
_LABELS = {"model_name", "engine", "pid"}  # say which server, not what was counted
_OPERATORS = {
    "==": operator.eq, "!=": operator.ne, ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
_EXPECTATION = re.compile(r"\s*(==|!=|>=|<=|>|<)?\s*(-?\d+(?:\.\d+)?)\s*")


def parse_metrics(text: str) -> dict[str, float]:
    """Counters of a Prometheus text, without prefix and `_total`; labels that tell something stay in the name."""
    from prometheus_client.parser import text_string_to_metric_families

    counters: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.type != "counter":
            continue
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            name = sample.name.rpartition(":")[2].removesuffix("_total")
            told = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in _LABELS)
            name = f"{name}{{{told}}}" if told else name
            counters[name] = counters.get(name, 0.0) + sample.value
    return counters


async def scrape(client: "Client") -> dict[str, float]:
    """Counters of /metrics and of `counters` in /server_info; nothing where a server has neither."""
    response = await client.get("/metrics")
    counters = parse_metrics(response.text) if response is not None else {}
    response = await client.get("/server_info")
    try:
        own = {} if response is None else response.json().get("counters", {})
        counters |= {str(name): float(value) for name, value in own.items()}
    except (ValueError, TypeError, AttributeError):
        pass  # another server's document of the same name
    return counters


def change(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What was counted in between."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def faults(counted: Mapping[str, float], expect: Mapping[str, str], allow_cached: bool) -> list[str]:
    """One line for each counter that is not what it must be."""
    must = dict.fromkeys(MUST_BE_ZERO if allow_cached else (*MUST_BE_ZERO, *CACHE_HITS), "==0")
    rules = {name: rule for name, rule in must.items() if _value(counted, name) is not None} | dict(expect)
    lines = []
    for name, rule in rules.items():
        if rule.strip() == "any":
            continue
        value = _value(counted, name)
        if not holds(rule, value or 0.0):  # what never happened is often not exposed
            lines.append(f"counter {name} is {'not exposed' if value is None else f'{value:g}'}, expected {rule}")
    return lines


def holds(rule: str, value: float) -> bool:
    """Whether a value is what a rule such as "0", ">0" or "<=12" says.

    Raises:
        ValueError: no rule.
    """
    match = _EXPECTATION.fullmatch(rule)
    if match is None:
        raise ValueError(f"expectation {rule!r}: need any, or a number with ==, !=, <, <=, > or >= before it")
    return bool(_OPERATORS[match[1] or "=="](value, float(match[2])))


def exposes(counted: Mapping[str, float], name: str) -> bool:
    """Whether a counter of this name, labels apart, was there at all."""
    return _value(counted, name) is not None


def _value(counted: Mapping[str, float], name: str) -> float | None:
    """A counter by its name; without labels, the sum over them."""
    found = [value for key, value in counted.items() if key == name or key.partition("{")[0] == name]
    return sum(found) if found else None
