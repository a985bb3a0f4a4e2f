// What the MXFP4 products of few pairs are given.
#pragma once

struct FewParams {
  Map codes;
  const uint8_t* scale;
  const uint16_t* x;         // x [T, K] or h [P, K], arranged
  const int *order, *table;  // [P] and [3, slots]: expert, first and stop of each tile
  uint16_t* out;             // h [P, N] in sorted order, arranged, or [P, N] in the order of pairs
  int slots, blocks, columns, width;  // blocks: pieces of a tile; columns: K; width: N
  int stages, slots_of_scales;        // of the two rings
  int top_k;
  int64_t x_stride;
  Activation activation;
};
