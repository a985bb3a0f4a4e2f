"""How the convolution of prompts is cut into programs.

Nothing here changes a bit of the convolution. Warps may change the order of the sum in a norm behind it.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One program's share of a segment: `streams` runs of tokens, `run` apart, walked side by side by `warps`."""

    streams: int
    run: int
    warps: int

    def __post_init__(self) -> None:
        """ValueError: what the kernel cannot be compiled with."""
        if any(n & (n - 1) for n in (self.streams, self.run, self.warps)) or not 1 <= self.warps <= 16:
            raise ValueError(f"tile {self.name}: accepted are powers of two, W up to 16")
        if self.streams < 1 or self.run < 4 or self.tokens < 16:
            raise ValueError(f"tile {self.name}: accepted are S from 1, R from 4, S x R from 16")

    @property
    def tokens(self) -> int:
        """Tokens of one program."""
        return self.streams * self.run

    @property
    def name(self) -> str:
        """As `parse` reads it."""
        return f"S{self.streams}R{self.run}W{self.warps}"


TILE = Tile(streams=4, run=32, warps=4)  # of the producer's layouts, at 1024 tokens as at 8192
PLAIN = Tile(streams=4, run=32, warps=2)  # of the convolution alone: a tenth faster at 1024 tokens, 3 % slower at 8192


def parse(name: str) -> Tile:
    """From S8R16W4: streams, tokens of a run, warps.

    Raises:
        ValueError: another form, or what the kernel cannot be compiled with.
    """
    found = re.fullmatch(r"S(\d+)R(\d+)W(\d+)", name)
    if found is None:
        raise ValueError(f"tile {name!r}: accepted is a form like {TILE.name}: streams, tokens of a run, warps")
    streams, run, warps = (int(n) for n in found.groups())
    return Tile(streams=streams, run=run, warps=warps)
