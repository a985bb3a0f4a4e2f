"""Which token counts the streaming kernels take, and how they are laid out. No layout changes a bit of the result."""

from dataclasses import dataclass

MOST_TOKENS, MOST_PAIRS = 8, 128  # what the kernels are compiled for
MOST_WIDTH, MOST_INNER, MOST_ROWS = 3584, 3072, 128  # the last: output columns of a block
# Of the 228 KB of a multiprocessor, of which every block costs one: a block of either launch side by side, but never
# two of the first.
WIDE, NARROW = 116_736, 114_688
WHOLE = 232_448


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamPlan:
    """How the two launches are laid out.

    A stage of the first ring holds `pairs` rows of gate and of up; `batch` pieces are summed at a time. A block of the
    first launch has `wide_bytes` of shared memory, one of the second `narrow_bytes`. `ahead`: the shared expert's
    weights are asked for before the router has ended. `trigger`: row pairs that a block of the first launch has still
    to ask for when the second may start. `blocks`: None is one on each multiprocessor. `chained`: a launch may start
    while the kernel before it runs.
    """

    pairs: int = 2
    batch: int = 4
    wide_bytes: int = WIDE
    narrow_bytes: int = NARROW
    ahead: bool = False
    trigger: int = 0
    blocks: int | None = None
    chained: bool = True

    def __post_init__(self) -> None:
        assert 1 <= self.pairs <= 8, "a tile has 16 rows, half of them of gate"
        assert 1 <= self.batch <= 8, "the kernels keep a note of 8 pieces"


# most tokens -> plan; above, the tiles of ops/experts/plan.py
_PLANS: tuple[tuple[int, StreamPlan], ...] = ((MOST_TOKENS, StreamPlan()),)


def choose_stream(tokens: int) -> StreamPlan | None:
    """The plan for this many tokens, None where the tiles are faster."""
    return next((plan for most, plan in _PLANS if tokens <= most), None)
