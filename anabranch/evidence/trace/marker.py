"""Find a launch that opens every repetition of a pattern, such as the one MLA kernel in each four layers."""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from anabranch.evidence.trace.steps import Step, wall

LOOKED_AT = 20_000  # launches of a step: enough to see any pattern


def find_marker(steps_of: Sequence[Sequence[Step]]) -> str:
    """The kernel that cuts steps into the most alike pieces, in every trace of `steps_of` (one list of steps each).

    Pieces are alike if they hold the same launches; what counts is the share of a step that lies in such pieces, and
    the first of equals wins. ValueError if nothing repeats.
    """
    middles = [_middle(steps) for steps in steps_of]
    counts = [Counter(event.name for event in step if event.kind in ("kernel", "cpu_op")) for step in middles]
    shared = set.intersection(*(set(count) for count in counts))
    common = [name for name in counts[0] if name in shared and len({count[name] for count in counts}) == 1]
    for least in (3, 2):
        often = [name for name in common if counts[0][name] >= least]
        if often:
            return max(often, key=lambda name: min(_alike(step, name) for step in middles))
    raise ValueError("no kernel repeats, equally often in every trace: name one with --marker")


def _middle(steps: Sequence[Step]) -> Step:
    return sorted(steps, key=wall)[(len(steps) - 1) // 2][:LOOKED_AT]


def _alike(step: Step, name: str) -> float:
    """Share of a step's launches that lie in the commonest kind of piece between two markers."""
    at = [index for index, event in enumerate(step) if event.name == name]
    pieces = Counter(frozenset(Counter(e.name for e in step[a:b]).items()) for a, b in pairwise(at))
    return max(times * sum(n for _, n in kind) for kind, times in pieces.items()) / len(step)


def exactly(name: str) -> str:
    """The pattern that this name alone matches."""
    return f"^{re.escape(name)}$"
