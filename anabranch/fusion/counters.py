"""What really ran, by name. Tests and benchmarks assert these, so that a path is never believed on its word."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_counts: Counter[str] = Counter()
_here = threading.local()


def add(name: str, amount: int = 1) -> None:
    """Count one event, e.g. `kda.split` (a prologue ran that path) or `kda.gemm` (one GEMM of a prologue)."""
    if not getattr(_here, "paused", False):
        _counts[name] += amount


def snapshot() -> dict[str, int]:
    """Every count since the process started."""
    return dict(_counts)


@contextmanager
def paused() -> Iterator[None]:
    """Nothing that this thread does in the block is counted: for dry runs beside a working engine."""
    _here.paused = True
    try:
        yield
    finally:
        _here.paused = False


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Yields a Counter that holds, once the block ends, what the block added."""
    before = _counts.copy()
    inside: Counter[str] = Counter()
    yield inside
    inside.update(_counts - before)
