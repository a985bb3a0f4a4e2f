// What the host and the kernels of grouped.cuh share: sizes, parameters, shared memory.
#pragma once

constexpr int ROWS = 128, BLOCK = 64, UNIT = 16;  // weight rows, columns a stage, pairs a product is a multiple of
constexpr int BOX = 32, WIDE_BOX = 128;           // pairs a load
constexpr int LARGE_MOST = 240 + 32, SMALL_MOST = 128 + 32;  // pairs of a tile
constexpr int CONSUMERS = 256, PRODUCERS = 128, STORERS = PRODUCERS - 32;  // threads; STORERS are PRODUCERS, too

// Whether warps of their own write the results. The sums of a larger tile take the room of a stage: gate-up gains all
// the same, `down`, which has fewer columns a piece, loses.
constexpr bool has_storers(bool gate_up, int most) { return gate_up || most <= SMALL_MOST; }

struct GroupedParams {
  Map weights, rows, wide;   // rows of sorted x, or of h: boxes of BOX, and of WIDE_BOX
  const int *order, *table;  // [P] and [3, slots]: expert, first and stop of each tile
  uint16_t* out;             // h [P, N] in sorted order, or [P, N] in the order of pairs
  int slots, blocks, columns, width;  // blocks: pieces of a tile; columns: K; width: N
  Activation activation;
};

template <bool GATE_UP, int MOST>
struct GroupedSmem {
  static constexpr bool HAS_STORERS = has_storers(GATE_UP, MOST);
  static constexpr int STAGES = MOST <= SMALL_MOST ? 5 : HAS_STORERS ? 3 : 4;
  static constexpr int LEFT = HAS_STORERS ? MOST : 64;  // pairs whose sums lie in shared memory at once
  struct Stage {
    char w[ROWS * 128], x[(MOST + BOX - 1) / BOX * BOX * 128];  // whole boxes
  };
  Stage stages[STAGES];
  char sums[LEFT * ROWS * 2];  // bf16, a row of all weight rows for each pair; without storers first one warpgroup's
  uint64_t full[STAGES], empty[STAGES], made, stored;  // the last two: of storers
};
