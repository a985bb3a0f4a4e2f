"""Where the kernels for one token are used, and how they are laid out. No layout changes a bit of the result."""

from dataclasses import dataclass

MOST_WARPS, MOST_DOWN_WARPS, MOST_CHOICES, MOST_WIDTH = 20, 28, 32, 7168
MOST_HIDDEN = 24 * 1024  # elements: hidden rows that a block of the second launch keeps, each in pieces of 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class GemvPlan:
    """How the two launches are laid out.

    `warps`: of a block of the first launch, each with one row of gate and of up under way. `down_warps`: of a block of
    the second, each with one output column; None is as many as one block on each multiprocessor takes. `blocks`: of the
    first launch, None is one on each multiprocessor. `chained`: a launch may start while the kernel before it runs.
    """

    warps: int = 12
    down_warps: int | None = None
    blocks: int | None = None
    chained: bool = True

    def __post_init__(self) -> None:
        assert 1 <= self.warps <= MOST_WARPS, "of 96 registers a thread"
        assert 1 <= (self.down_warps or 1) <= MOST_DOWN_WARPS, "of 64 registers a thread"


def choose_gemv(inner: int) -> GemvPlan | None:
    """The plan for one token and experts of this inner width, None where the tiles are used."""
    return GemvPlan() if inner >= 1024 else None
