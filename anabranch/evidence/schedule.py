"""The order of the runs: A against itself first, then A and B in adjacent pairs."""

from anabranch.evidence.rundir import CONTROL, RunName
from anabranch.evidence.spec import Spec

_CONTROL_SEED = 10_007


def plan_runs(spec: Spec) -> list[RunName]:
    """All runs in the order in which they are measured: C1 C2 ... (arm A), then A1 B1 A2 B2 ... ."""
    a, b = spec.a.name, spec.b.name
    count = 2 * spec.schedule.control
    runs = [RunName(label=f"C{i}", arm=a, slot=f"{CONTROL}-{i}", phase=CONTROL) for i in range(1, count + 1)]
    for i in range(1, spec.schedule.pairs + 1):
        pair = [RunName(label=f"A{i}", arm=a, slot=f"{a}-{i}"), RunName(label=f"B{i}", arm=b, slot=f"{b}-{i}")]
        runs += reversed(pair) if spec.schedule.order == "ABBA" and i % 2 == 0 else pair
    return runs


def prompt_seed(spec: Spec, run: RunName) -> int:
    """Of a run's prompts: those of its pair alone, so that no run finds another pair's prompts in a cache."""
    return spec.workload.seed + number(run) - 1 + (_CONTROL_SEED if run.phase == CONTROL else 0)


def number(run: RunName) -> int:
    """Which pair a run belongs to, from 1; both runs of a pair are asked the same."""
    i = int(run.label[1:])
    return (i + 1) // 2 if run.phase == CONTROL else i


def ask_exact(spec: Spec, run: RunName) -> bool:
    """Whether the fixed inputs are asked in this run."""
    return spec.exact is not None and run.phase != CONTROL and number(run) <= spec.exact.pairs
