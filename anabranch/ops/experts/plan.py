"""How the expert kernels are cut, from host shapes alone: tiles, and how a program finds its tokens.

Nothing here changes a bit of the result.
"""

from dataclasses import dataclass

import torch

# how a program finds its pairs: in a table sorted by expert; among the choices of a few tokens; a lone token's slot
SORTED, FEW, LONE = 0, 1, 2
FEW_TOKENS = 16
RIDER_TOKENS = 64  # up to here a shared expert rides in the launches of the routed ones


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """T tokens by R weight rows (of gate and of up each) by K columns a step.

    `stacked`: gate and up rows take turns in one product of 2*R rows, as they always do below 64.
    """

    T: int
    R: int
    K: int
    num_warps: int = 4
    num_stages: int = 4
    stacked: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The tiles of gate-up (`wide`) and down (`narrow`), equal in T.

    `few`: up to T tokens find their experts without a sort. Of a sorted run of pairs, the last tile takes up to `tail`
    more than T, beside the others on the same weights.
    """

    wide: Tile
    narrow: Tile
    few: int = FEW_TOKENS
    tail: int = 0

    def __post_init__(self) -> None:
        assert self.wide.T == self.narrow.T, "both GEMMs walk the same tiles of pairs"
        assert self.tail < self.T, "a tail is less than a tile"
        assert self.wide.stacked or not self.tail, "a tail needs gate and up in one product"

    @property
    def T(self) -> int:
        return self.wide.T

    def mode(self, tokens: int) -> int:
        """SORTED, FEW or LONE."""
        if tokens == 1:
            return LONE
        return FEW if tokens <= min(self.few, self.T) else SORTED


_FP32 = Plan(wide=Tile(T=16, R=64, K=32, num_stages=2), narrow=Tile(T=16, R=64, K=32, num_stages=2))
# most pairs an expert gets on average -> tiles
_BF16: tuple[tuple[float, Plan], ...] = (
    (0.5, Plan(wide=Tile(T=16, R=32, K=128, num_stages=8), narrow=Tile(T=16, R=64, K=128))),
    (2, Plan(wide=Tile(T=16, R=64, K=128, num_stages=6), narrow=Tile(T=16, R=64, K=128))),
    (8, Plan(wide=Tile(T=16, R=64, K=64), narrow=Tile(T=16, R=64, K=128))),
    (24, Plan(wide=Tile(T=32, R=64, K=64), narrow=Tile(T=32, R=64, K=128))),
    (96, Plan(wide=Tile(T=64, R=64, K=64), narrow=Tile(T=64, R=128, K=64))),
    # most of a run fits a whole tile, and the 32 pairs behind it ride along: 9 % of 8192 tokens
    (
        192,
        Plan(
            wide=Tile(T=128, R=128, K=64, num_warps=8, stacked=True),
            narrow=Tile(T=128, R=256, K=64, num_warps=8),
            tail=32,
        ),
    ),
    (
        float("inf"),
        Plan(
            wide=Tile(T=256, R=64, K=64, num_warps=8, stacked=True),
            narrow=Tile(T=256, R=128, K=64, num_warps=8),
            tail=32,
        ),
    ),
)
_MXFP4: tuple[tuple[float, Plan], ...] = (
    (12, Plan(wide=Tile(T=16, R=64, K=128), narrow=Tile(T=16, R=128, K=128, num_stages=3))),
    (24, Plan(wide=Tile(T=32, R=64, K=128, num_stages=3), narrow=Tile(T=32, R=64, K=128))),
    (
        float("inf"),
        Plan(
            wide=Tile(T=64, R=128, K=128, num_warps=8, num_stages=3),
            narrow=Tile(T=64, R=128, K=128, num_warps=8, num_stages=3),
        ),
    ),
)
_LONE_TOKEN = Plan(wide=Tile(T=16, R=32, K=128, num_stages=8), narrow=Tile(T=16, R=64, K=128, num_stages=3))


def choose_plan(tokens: int, top_k: int, experts: int, dtype: torch.dtype, fp4: bool = False) -> Plan:
    """The plan for this many tokens that choose among `experts` experts, those of all ranks together."""
    if dtype == torch.float32:
        return _FP32
    if tokens == 1 and not fp4:
        return _LONE_TOKEN
    return next(plan for most, plan in (_MXFP4 if fp4 else _BF16) if tokens * top_k / experts <= most)
