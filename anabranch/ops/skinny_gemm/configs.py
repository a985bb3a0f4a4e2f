"""How a product is laid out on the device: which compiled variant, how many clusters, how deep a ring.

None of it changes a bit of the result. The choices follow sweeps on an H200 (docs/fusions.md); `candidates` lists
every legal layout of a shape, for the sweep and for the tests.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import cache

from anabranch.ops.skinny_gemm.spec import SEGMENTS, TOKENS

BLOCK = 64  # columns of K that a 128-byte swizzled row holds
ROWS = 64  # weight rows of a consumer warpgroup
SHARED = 232_448  # bytes that one CTA may use on Hopper
HEADER = 1024  # barriers
MAX_STAGES = 32

TILES = (8, 16, 24, 32, 64, TOKENS)

# (C, XR, T, WGS, KB): CTAs that split K, groups that share x, token tile, warpgroups, K blocks of a stage
VARIANTS: tuple[tuple[int, int, int, int, int], ...] = (
    *((2, 1, t, 1, kb) for t, kbs in ((8, (2, 3, 4)), (16, (2, 3, 4))) for kb in kbs),
    *((2, 1, t, 1, kb) for t in (24, 32, 64) for kb in (1, 2, 3)),
    *((2, 1, t, 2, kb) for t in (8, 16, 24, 32) for kb in (1, 2, 3)),
    *((2, 1, 64, 2, kb) for kb in (1, 2)),
    (2, 2, 128, 1, 1),
    (2, 2, 128, 2, 1),
    (2, 4, 128, 1, 1),
    *((4, 1, 16, 1, kb) for kb in (1, 2, 4)),
    *((4, 1, 32, 1, kb) for kb in (1, 2)),
    (4, 1, 64, 1, 1),
    (4, 1, 128, 1, 1),
)
LOW_VARIANTS: tuple[tuple[int, int, int, int, int], ...] = (
    *((2, 1, t, wgs, kb) for t in (8, 16, 24, 32) for wgs in (1, 2) for kb in (2, 3)),
    (2, 1, 8, 1, 4),
    (2, 1, 64, 1, 1),
    *((2, 1, 64, 2, kb) for kb in (1, 2)),
)


@dataclass(frozen=True, slots=True)
class Clusters:
    """How many clusters of 2, 4 and 8 CTAs with a full ring a device holds at once; an H200: 66, 30, 15."""

    pairs: int
    quads: int
    octets: int

    def of(self, size: int) -> int:
        """Clusters of `size` CTAs."""
        return {2: self.pairs, 4: self.quads, 8: self.octets}[size]


H200 = Clusters(66, 30, 15)


@dataclass(frozen=True, slots=True)
class Config:
    """Launch parameters, in the order of the struct in skinny_gemm.cu."""

    C: int
    XR: int
    T: int
    WGS: int
    KB: int
    clusters: int
    passes: int
    ring: int
    trigger: int = 8
    ahead: int = 2
    low_tiles: int = 0
    low_ahead: int = 1


def token_tile(tokens: int) -> int:
    """The narrowest compiled token tile that holds `tokens`."""
    return next(t for t in TILES if tokens <= t)


def supported(tokens: int, rows: int, columns: int) -> bool:
    """Whether the kernel can do [tokens, columns] x [rows, columns]^T."""
    return 1 <= tokens <= TOKENS and rows >= 8 and rows % 8 == 0 and columns > 0 and columns % (SEGMENTS * BLOCK) == 0


def _laid_out(variant: tuple[int, int, int, int, int], rows: int, columns: int, device: Clusters) -> Config | None:
    """The variant on this shape with as few passes as its tiles allow, or None where it does not fit."""
    C, XR, T, WGS, KB = variant
    if columns // (SEGMENTS * BLOCK) % KB:
        return None
    groups, tiles = rows // 8, device.of(C * XR) * XR
    clusters = device.of(C * XR) if groups >= tiles else groups // XR
    if clusters == 0:
        return None
    passes = -(-groups // (clusters * XR * (WGS * ROWS // 8)))
    if groups < passes * clusters * XR:
        return None
    tallest = -(-groups // (clusters * XR * passes)) * 8
    stage = KB * (tallest + T) * 128
    box = T * 256 * WGS if C > 1 else 0
    stages = passes * (columns // BLOCK // C // KB)
    # never more than all of it: what is left lets the next kernel's blocks in early
    ring = min((SHARED - HEADER - box) // stage, MAX_STAGES, max(2, stages)) * stage
    reach = ring // stage * KB * tallest * 128 + WGS * ROWS * 128  # wgmma reads whole groups of 64 rows
    if ring < 2 * stage or HEADER + reach > SHARED:
        return None
    return Config(C, XR, T, WGS, KB, clusters, passes, ring)


def candidates(tokens: int, rows: int, columns: int, device: Clusters = H200) -> Iterator[Config]:
    """Every compiled layout of this product with a token tile that is not wastefully wide."""
    tile = token_tile(tokens)
    for variant in VARIANTS:
        if variant[2] == tile or (variant[0] == 4 and variant[2] <= 2 * tile and tile <= variant[2]):
            config = _laid_out(variant, rows, columns, device)
            if config is not None:
                yield config


def _preferred(tile: int, rows: int, device: Clusters) -> list[tuple[int, int, int, int, int]]:
    """Variants in order of preference for a token tile."""
    one, two = rows <= device.pairs * ROWS, rows <= device.pairs * 2 * ROWS
    if rows // 8 <= device.quads:  # a few rows: split K further, so that more of the device reads
        wide = next(t for t in (16, 32, 64, TOKENS) if tile <= t)
        return [(4, 1, wide, 1, kb) for kb in (4, 2, 1)]
    if tile <= 16 and one:
        return [(2, 1, tile, 1, kb) for kb in (4, 3, 2)]
    if tile <= 32 or (tile == 64 and one):
        return [(2, 1, tile, 1 if one else 2, kb) for kb in (2, 3, 1)]
    if tile == 64:
        return [(2, 1, 64, 2, kb) for kb in ((1, 2) if two else (2, 1))]
    return [(2, 4, 128, 1, 1), (2, 2, 128, 1, 1)] if one else [(2, 2, 128, 2, 1)]


@cache
def choose(tokens: int, rows: int, columns: int, device: Clusters = H200) -> Config | None:
    """The layout for [tokens, columns] x [rows, columns]^T; None where no variant fits."""
    if not supported(tokens, rows, columns):
        return None
    tile = token_tile(tokens)
    options = (_laid_out(v, rows, columns, device) for v in _preferred(tile, rows, device) if v in VARIANTS)
    found = next((c for c in options if c is not None), None) or next(candidates(tokens, rows, columns, device), None)
    if found is None:
        return None
    return replace(found, ahead=4 if found.passes == 1 and tile >= 24 else 2)


@cache
def choose_low_rank(tokens: int, rows: int, columns: int, low_row0: int, device: Clusters = H200) -> Config | None:
    """The layout of the prologue: `rows` rows of which those from `low_row0` are done first; None if none fits."""
    if not supported(tokens, rows, columns) or low_row0 % 8 or tokens > 64:
        return None
    tile = token_tile(tokens)
    fitting = [v for v in LOW_VARIANTS if v[2] == tile and columns // (SEGMENTS * BLOCK) % v[4] == 0]
    layouts = [c for v in fitting if (c := _low_rank_layout(v, rows, low_row0, device)) is not None]
    if not layouts:
        return None
    best = min(layouts, key=lambda c: c.passes)
    return replace(best, ahead=4 if best.passes == 1 and tile >= 16 else 2)


def _low_rank_layout(
    variant: tuple[int, int, int, int, int], rows: int, low_row0: int, device: Clusters
) -> Config | None:
    C, XR, T, WGS, KB = variant
    main, tail = low_row0 // 8, (rows - low_row0) // 8
    per_tile, clusters = WGS * ROWS // 8, device.pairs
    passes = -(-(main + tail) // (clusters * per_tile))
    for low_tiles in range(1, clusters):
        tiles = clusters * passes - low_tiles
        if main < tiles:
            return None
        tallest, tail_tallest = -(-main // tiles), -(-tail // low_tiles)
        if tallest > per_tile or tail_tallest > (per_tile if passes == 1 else tallest):
            continue
        # the tail must be done well before the rest, or the second product ends the launch late
        if passes == 1 and tail_tallest > 0.8 * tallest:
            continue
        stage, box = KB * (tallest * 8 + T) * 128, T * 256 * WGS
        ring = min((SHARED - HEADER - box) // stage, MAX_STAGES) * stage
        if ring < 2 * stage or ring < 2 * KB * (tail_tallest * 8 + T) * 128:
            return None
        return Config(C, XR, T, WGS, KB, clusters, passes, ring, low_tiles=low_tiles)
    return None


def as_ints(config: Config) -> tuple[int, ...]:
    """The fields in launch order."""
    return astuple(config)


def faster(tokens: int, rows: int, columns: int) -> bool:
    """Whether the kernel beats cuBLAS on an H200: the rows in benchmarks/results/skinny_gemm.jsonl."""
    return tokens <= 64 or (tokens <= TOKENS and columns >= 4096 and 3000 <= rows <= 3840)


def low_rank_faster(tokens: int) -> bool:
    """The same for the second, low-rank product behind ours."""
    return tokens <= 64
