"""Draws word problems from the templates, with worked answers in the form of GSM8K: lines, then `#### NUMBER`.

Which numbers a template may take in training and which are held out is decided by a hash of template and numbers: no
held-out problem can be met in training, whatever the seeds.
"""

import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from .templates import BOXES, ITEMS, NAMES, PLACES, TEMPLATES, Template

LIMIT = 400  # no result is larger
FACTOR = 12  # of a product one factor, of a quotient the divisor is at most this
HELD_OUT = 16  # one set of numbers in so many is held out
SHOTS = 5

_CHOICE = re.compile(r"<([^<>]*)>")
_SUM = re.compile(r"\[(\w+)([-+*/])(\w+)\]")


@dataclass(frozen=True)
class Problem:
    """`numbers` are the template's variables in their order; the answer ends in `result`."""

    template: int
    numbers: tuple[int, ...]
    question: str
    answer: str
    result: int

    @property
    def held_out(self) -> bool:
        return is_held_out(self.template, self.numbers)


def is_held_out(template: int, numbers: tuple[int, ...]) -> bool:
    """Whether this template with these numbers is kept from training."""
    return zlib.crc32(f"{template}:{numbers}".encode()) % HELD_OUT == 0


def draw(rng: random.Random, held_out: bool) -> Problem:
    """One problem from the training or from the held-out numbers."""
    [index] = rng.choices(range(len(TEMPLATES)), [t.weight for t in TEMPLATES])
    template = TEMPLATES[index]
    while True:
        numbers = {name: rng.randint(*span) for name, span in template.ranges.items()}
        values = tuple(numbers.values())
        if is_held_out(index, values) != held_out or (results := _results(template, numbers)) is None:
            continue
        return _worded(index, numbers, results, rng)


def documents(seed: int, size: int, held_out: bool) -> Iterator[str]:
    """Documents of one to eight problems in the prompt format of `eval gsm8k`, `size` characters or a little more."""
    rng, made = random.Random(seed), 0
    while made < size:
        text = "\n\n".join(formatted(draw(rng, held_out)) for _ in range(rng.randint(1, 8)))
        made += len(text)
        yield text


def formatted(problem: Problem) -> str:
    """As a worked example stands in a prompt."""
    return f"Question: {problem.question}\nAnswer: {problem.answer}"


def problem_set(seed: int, count: int, held_out: bool = True) -> list[Problem]:
    """`count` problems with questions of their own."""
    rng, found = random.Random(seed), {}
    while len(found) < count:
        problem = draw(rng, held_out)
        found.setdefault(problem.question, problem)
    return list(found.values())


def _results(template: Template, numbers: dict[str, int]) -> list[int] | None:
    """What each step comes to; None where one is not a small whole number above 0."""
    known, results = dict(numbers), []
    for i, step in enumerate(template.steps, 1):
        found = _SUM.search(step)
        assert found is not None, step
        x, operator, y = _value(found[1], known), found[2], _value(found[3], known)
        if (operator == "*" and min(x, y) > FACTOR) or (operator == "/" and (y > FACTOR or x % y)):
            return None
        result = {"+": x + y, "-": x - y, "*": x * y, "/": x // y}[operator]
        if not 0 < result <= LIMIT:
            return None
        known[f"r{i}"] = result
        results.append(result)
    return results


def _value(name: str, known: dict[str, int]) -> int:
    return known[name] if name in known else int(name)


def _worded(index: int, numbers: dict[str, int], results: list[int], rng: random.Random) -> Problem:
    template = TEMPLATES[index]
    name, name2 = rng.sample(NAMES, 2)
    item, item2 = rng.sample(ITEMS, 2)
    words: dict[str, object] = {"name": name, "name2": name2, "item": item, "item2": item2}
    words |= {"they": rng.choice(("He", "She")), "box": rng.choice(BOXES), "place": rng.choice(PLACES), **numbers}
    question = _CHOICE.sub(lambda found: rng.choice(found[1].split("|")), template.question).format(**words)
    known = numbers | {f"r{i}": result for i, result in enumerate(results, 1)}

    def work(found: re.Match[str], result: int) -> str:
        return f"{_value(found[1], known)}{found[2]}{_value(found[3], known)}={result}"

    lines = [
        _SUM.sub(partial(work, result=result), step).format(**words)
        for step, result in zip(template.steps, results, strict=True)
    ]
    answer = "\n".join([*lines, f"#### {results[-1]}"])
    return Problem(index, tuple(numbers.values()), question, answer, results[-1])
