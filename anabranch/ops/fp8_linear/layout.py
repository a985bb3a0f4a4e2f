"""How the CUDA product is laid out: which compiled variant, how many clusters, how deep a ring. It changes no bit.

A cluster of two CTAs owns a tile of weight rows and splits K; see csrc/coded.cuh. `candidates` lists every layout of a
shape, for the sweep and for the tests.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import cache

from anabranch.ops.fp8_linear.reference import BLOCK
from anabranch.ops.skinny_gemm.configs import H200, HEADER, MAX_STAGES, ROWS, SHARED, Clusters

TOKENS = 128  # the tallest token tile
PAIR = 2 * BLOCK  # K is split between two CTAs in whole blocks

# (XR, T, WGS, KB): pairs of CTAs that share x, token tile, warpgroups, K blocks of a stage
VARIANTS: tuple[tuple[int, int, int, int], ...] = (
    *((1, t, wgs, 1) for t in (8, 16, 32) for wgs in (1, 2, 4)),
    *((1, t, 2, 2) for t in (8, 16, 32)),
    (1, 8, 4, 2),
    *((xr, 64, wgs, 1) for xr in (1, 2) for wgs in (1, 2)),
    *((2, 128, wgs, 1) for wgs in (1, 2)),
)
TILES = tuple(sorted({t for _, t, _, _ in VARIANTS}))


@dataclass(frozen=True, slots=True)
class Layout:
    """Launch parameters, in the order of the struct in fp8_linear.cu."""

    XR: int
    T: int
    WGS: int
    KB: int
    clusters: int
    passes: int
    ring: int
    trigger: int = 8
    ahead: int = 2

    @property
    def name(self) -> str:
        """The variant: pairs that share x, tokens, warpgroups, blocks of a stage."""
        return f"X{self.XR}T{self.T}G{self.WGS}B{self.KB}"


def supported(tokens: int, rows: int, columns: int) -> bool:
    """Whether the kernel can do [tokens, columns] x [rows, columns]^T."""
    return 1 <= tokens <= TOKENS and rows >= 16 and rows % 8 == 0 and columns > 0 and columns % PAIR == 0


def _laid_out(variant: tuple[int, int, int, int], rows: int, columns: int, device: Clusters) -> Layout | None:
    """The variant on this shape with as few passes as its tiles allow, or None where it does not fit."""
    XR, T, WGS, KB = variant
    part = columns // PAIR
    if KB > 1 and part % (2 * KB):
        return None
    groups, most = rows // 8, device.of(2 * XR)
    clusters = min(most, groups // XR)
    if clusters == 0:
        return None
    passes = -(-groups // (clusters * XR * WGS * ROWS // 8))
    if groups < passes * clusters * XR:
        return None
    tallest = -(-groups // (clusters * XR * passes)) * 8
    stage, box, scales = KB * (tallest + 2 * T) * 128, T * 256 * WGS, passes * ((WGS + 1) // 2 + 1) * part * 4
    stages = min((SHARED - HEADER - box - scales) // stage, MAX_STAGES, max(2, passes * part // KB))
    reach = (stages * KB * tallest + WGS * ROWS) * 128  # a warpgroup reads whole groups of 64 rows
    if stages < 2 or HEADER + reach > SHARED:
        return None
    return Layout(XR, T, WGS, KB, clusters, passes, stages * stage)


def candidates(tokens: int, rows: int, columns: int, device: Clusters = H200) -> Iterator[Layout]:
    """Every compiled layout of this product with the narrowest token tile that holds it."""
    tile = next(t for t in TILES if tokens <= t)
    for variant in VARIANTS:
        layout = _laid_out(variant, rows, columns, device) if variant[1] == tile else None
        if layout is not None:
            yield layout


def _preferred(tile: int, rows: int, device: Clusters) -> list[tuple[int, int, int, int]]:
    """Variants in order of preference for a token tile."""
    if tile == 128:
        return [(2, 128, 1 if rows <= device.quads * 2 * ROWS else 2, 1)]
    if tile == 64:
        return [(1, 64, 1 if rows <= device.pairs * ROWS else 2, 1)]
    if tile > 8 and rows <= device.pairs * ROWS:  # a tile fills one warpgroup; a second would double the products
        return [(1, tile, 1, 1), (1, tile, 2, 1)]
    high = rows > device.pairs * 2 * ROWS  # one pass of four warpgroups rather than two of two
    return [(1, tile, 4 if high else 2, kb) for kb in (2, 1)] + [(1, tile, 1, 1)]


@cache
def choose(tokens: int, rows: int, columns: int, device: Clusters = H200) -> Layout | None:
    """The layout for [tokens, columns] x [rows, columns]^T; None where no variant fits."""
    if not supported(tokens, rows, columns):
        return None
    tile = next(t for t in TILES if tokens <= t)
    options = (_laid_out(v, rows, columns, device) for v in _preferred(tile, rows, device) if v in VARIANTS)
    found = next((x for x in options if x is not None), None) or next(candidates(tokens, rows, columns, device), None)
    return found and replace(found, ahead=4 if found.passes == 1 and tile >= 32 else 2)


def as_ints(layout: Layout) -> tuple[int, ...]:
    """The fields in launch order."""
    return astuple(layout)
