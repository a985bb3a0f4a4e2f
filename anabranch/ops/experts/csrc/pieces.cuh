// What programs of the experts walk through: pieces, each a block of weight rows of one tile's expert against its pairs.
#pragma once

struct Tile {
  int expert, first, held, block;
};

// The i-th piece of a table of tiles, whose entries behind the last have expert -1; that, too, behind its end.
template <class Params>
DEV Tile tile_at(const Params& p, int i) {
  const int slot = i / p.blocks;
  if (slot >= p.slots) return {-1, 0, 0, 0};
  const int first = p.table[p.slots + slot];
  return {p.table[slot], first, p.table[2 * p.slots + slot] - first, i - slot * p.blocks};
}

struct Place {  // in a ring
  int stage = 0;
  uint32_t phase;
  DEV void next(int stages) {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
};
