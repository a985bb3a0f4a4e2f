// The two products of MXFP4 experts for few pairs an expert: gate-up with the activation, and down.
//
// Pairs (token, choice) are sorted by expert and cut into tiles of at most TOKENS (ops/experts/tiles.py). A program
// stays on its multiprocessor and walks through pieces: ROWS weight rows of one tile's expert against all its pairs.
// Codes cross memory as they lie in the checkpoint, by TMA into a ring of stages that never drains between pieces: one
// warp asks for codes and scales, whose addresses the kernel before does not decide, another for the rows of x or h.
//
// Every other warp multiplies 32 rows by mma.sync, all of K in ascending order in one accumulator. ldmatrix hands a
// lane the words of a row whose nibbles are its own columns of the next products, as columns are arranged
// (ops/mxfp4/triton.py): a word is widened in registers, and no warp waits for another. The bits are those of Triton's.
#pragma once
#ifdef ANABRANCH_EMULATE
#include "few.h"
#else
#include "few_ptx.cuh"

#include "../experts/csrc/activation.cuh"
#include "../experts/csrc/pieces.cuh"
#endif
#include "codes.cuh"
#include "few_params.cuh"

constexpr int BOX_COLUMNS = 256, MOST_STAGES = 16;
// of nine cuts (4 to 16 warps of 16 to 64 rows, 1 to 3 programs of a multiprocessor) best or within 2 % at five shapes
constexpr int WARPS = 4, MT = 2, CTAS = 2;

template <bool GATE_UP, int NT>
struct Few {
  static constexpr int BOXES = NT == 1 ? 2 : 1;  // of a stage: two if two stages fit, as they do not at 16 tokens
  static constexpr int ROWS = WARPS * MT * 16, TOKENS = NT * 8, THREADS = (WARPS + 2) * 32;
  static constexpr int CODES = BOXES * ROWS * 128, X_PITCH = BOXES * BOX_COLUMNS * 2 + 16, X_BYTES = TOKENS * X_PITCH;
  static constexpr int HEADER = 1024;
  static int shared_bytes(int columns, int stages, int scales) {
    return HEADER + stages * (CODES + X_BYTES) + scales * ROWS * (columns / 32);
  }

  const FewParams& p;
  int lane, warp, boxes, steps, groups;
  uint32_t base;
  char* smem;

  DEV Few(const FewParams& p, char* smem) : p(p), smem(smem) {
    lane = threadIdx.x % 32, warp = threadIdx.x / 32, base = shared_address(smem);
    boxes = (p.columns + BOX_COLUMNS - 1) / BOX_COLUMNS, steps = (boxes + BOXES - 1) / BOXES, groups = p.columns / 32;
  }

  DEV uint32_t full(int stage) const { return base + stage * 8; }
  DEV uint32_t empty(int stage) const { return base + (MOST_STAGES + stage) * 8; }
  DEV uint32_t scales_empty(int slot) const { return base + (2 * MOST_STAGES + slot) * 8; }
  DEV uint32_t codes(int stage) const { return base + HEADER + stage * CODES; }
  DEV uint32_t rows(int stage) const { return base + HEADER + p.stages * CODES + stage * X_BYTES; }
  DEV uint32_t scales(int slot) const { return base + HEADER + p.stages * (CODES + X_BYTES) + slot * ROWS * groups; }

  DEV void set_up() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < p.stages; i++) barrier_init(full(i), 2), barrier_init(empty(i), WARPS);
      for (int i = 0; i < p.slots_of_scales; i++) barrier_init(scales_empty(i), WARPS);
      barrier_init_done();
    }
    __syncthreads();
  }

  DEV Tile tile(int i) const { return tile_at(p, i); }

  // --- producers ----------------------------------------------------------------------------------------------------

  DEV void copy_scales(const Tile& t, int slot, uint32_t bar) const {
    const int all = p.blocks * ROWS;  // rows of an expert
    if constexpr (GATE_UP) {
      const uint8_t* from = p.scale + ((int64_t)t.expert * all + t.block * (ROWS / 2)) * groups;
      copy_bulk(scales(slot), from, ROWS / 2 * groups, bar);
      copy_bulk(scales(slot) + ROWS / 2 * groups, from + (int64_t)all / 2 * groups, ROWS / 2 * groups, bar);
    } else {
      copy_bulk(scales(slot), p.scale + ((int64_t)t.expert * all + t.block * ROWS) * groups, ROWS * groups, bar);
    }
  }

  // Codes and scales, by one thread
  DEV void load_weights() const {
    Place at{0, 1}, slot{0, 1};
    Tile t = tile(blockIdx.x);
    for (int i = blockIdx.x + gridDim.x; t.expert >= 0; i += gridDim.x) {
      const Tile next = tile(i);
      for (int step = 0; step < steps; step++, at.next(p.stages)) {
        const uint32_t bar = full(at.stage);
        const int count = min(BOXES, boxes - step * BOXES);
        barrier_wait(empty(at.stage), at.phase);
        if (step == 0) barrier_wait(scales_empty(slot.stage), slot.phase);
        barrier_expect(bar, count * ROWS * 128 + (step == 0 ? ROWS * groups : 0));
        for (int b = 0; b < count; b++) {
          const uint32_t to = codes(at.stage) + b * ROWS * 128;
          const int column = (step * BOXES + b) * (BOX_COLUMNS / 4);
          if constexpr (GATE_UP)
            load_box(to, p.codes, column, 0, 0, t.block * (ROWS / 16), t.expert, bar, kEvictFirst);
          else load_box(to, p.codes, column, t.block * ROWS, t.expert, 0, 0, bar, kEvictFirst);
        }
        if (step == 0) copy_scales(t, slot.stage, bar);
      }
      slot.next(p.slots_of_scales);
      t = next;
    }
  }

  // A lane's row of x or h
  DEV const uint16_t* row_of(const Tile& t) const {
    if (t.expert < 0 || lane >= t.held) return p.x;
    return p.x + (GATE_UP ? p.order[t.first + lane] / p.top_k * p.x_stride : (int64_t)(t.first + lane) * p.columns);
  }

  DEV void load_rows() const {
    Place at{0, 1};
    Tile t = tile(blockIdx.x);
    const uint16_t* row = row_of(t);
    for (int i = blockIdx.x + gridDim.x; t.expert >= 0; i += gridDim.x) {
      const Tile next = tile(i);
      const uint16_t* const next_row = row_of(next);
      for (int step = 0; step < steps; step++, at.next(p.stages)) {
        const int from = step * BOXES * BOX_COLUMNS, bytes = min(BOXES * BOX_COLUMNS, p.columns - from) * 2;
        barrier_wait(empty(at.stage), at.phase);
        if (lane == 0) barrier_expect(full(at.stage), t.held * bytes);
        __syncwarp();
        if (lane < t.held) copy_bulk(rows(at.stage) + lane * X_PITCH, row + from, bytes, full(at.stage));
      }
      t = next, row = next_row;
    }
  }

  // --- consumers ----------------------------------------------------------------------------------------------------

  // The words of a warp's rows lane / 4 and 8 further of every 16, in a block of 128 columns, and their scales
  struct Words {
    uint32_t upper[MT][4], lower[MT][4], upper_scales[MT], lower_scales[MT];
  };

  template <int NIBBLE, int HALF, class Scales>
  DEV void product(float (&acc)[MT][NT][4], const Words& w, const Scales (&up)[MT], const Scales (&down)[MT],
                   const uint32_t (&x)[NT][4][4]) const {
    constexpr int A = 2 * HALF, B = 2 * HALF + 1;
#pragma unroll
    for (int m = 0; m < MT; m++) {
      const uint32_t left[4] = {up[m].template times<A>(moved<NIBBLE>(w.upper[m][A])),
                                down[m].template times<A>(moved<NIBBLE>(w.lower[m][A])),
                                up[m].template times<B>(moved<NIBBLE>(w.upper[m][B])),
                                down[m].template times<B>(moved<NIBBLE>(w.lower[m][B]))};
#pragma unroll
      for (int n = 0; n < NT; n++) mma_bf16(acc[m][n], left, x[n][NIBBLE][A], x[n][NIBBLE][B]);
    }
  }
  template <class Scales>
  DEV void multiply(float (&acc)[MT][NT][4], const Words& w, const uint32_t (&x)[NT][4][4]) const {
    Scales up[MT], down[MT];
#pragma unroll
    for (int m = 0; m < MT; m++) up[m] = Scales(w.upper_scales[m]), down[m] = Scales(w.lower_scales[m]);
    product<0, 0>(acc, w, up, down, x), product<0, 1>(acc, w, up, down, x);
    product<1, 0>(acc, w, up, down, x), product<1, 1>(acc, w, up, down, x);
    product<2, 0>(acc, w, up, down, x), product<2, 1>(acc, w, up, down, x);
    product<3, 0>(acc, w, up, down, x), product<3, 1>(acc, w, up, down, x);
  }

  // 128 columns of all rows of this warp
  DEV void multiply_block(float (&acc)[MT][NT][4], uint32_t codes, uint32_t rows, uint32_t scale) const {
    const uint32_t further = (GATE_UP ? ROWS / 2 : 8) * groups, next = (GATE_UP ? 8 : 16) * groups;
    Words w;
    uint32_t x[NT][4][4], all = 0;
#pragma unroll
    for (int m = 0; m < MT; m++) {
      w.upper_scales[m] = load_word(scale + m * next), w.lower_scales[m] = load_word(scale + m * next + further);
      all |= w.upper_scales[m] | w.lower_scales[m];
      load_matrices<4>(w.upper[m], codes + m * 2048), load_matrices<4>(w.lower[m], codes + m * 2048 + 1024);
    }
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int q = 0; q < 4; q++) load_matrices<4>(x[n][q], rows + n * 8 * X_PITCH + q * 64);
    if (any_lane(all & 0x80808080)) multiply<Wide>(acc, w, x);
    else multiply<Plain>(acc, w, x);
  }

  DEV void multiply_tile(float (&acc)[MT][NT][4], Place& at, int slot) const {
#pragma unroll
    for (int i = 0; i < MT * NT * 4; i++) acc[i / (NT * 4)][i / 4 % NT][i % 4] = 0.f;
    const int first = warp * MT * (GATE_UP ? 8 : 16) + lane / 4;
    uint32_t scale = scales(slot) + first * groups;
    const uint32_t w = (warp * MT * 16 + lane % 8) * 128 + ((lane / 8 ^ lane % 8) << 4);
    const uint32_t x = lane % 8 * X_PITCH + lane / 8 * 16;
    for (int step = 0, left = p.columns / 128; step < steps; step++, left -= 2 * BOXES, at.next(p.stages)) {
      barrier_wait(full(at.stage), at.phase);
      const uint32_t from = codes(at.stage) + w, beside = rows(at.stage) + x;
      const int count = min(2 * BOXES, left);
#pragma unroll 1
      for (int b = 0; b < count; b++, scale += 4)
        multiply_block(acc, (from + b / 2 * (ROWS * 128)) ^ b % 2 << 6, beside + b * 256, scale);
      release(empty(at.stage));
    }
    release(scales_empty(slot));
  }
  DEV void release(uint32_t bar) const {
    __syncwarp();
    if (lane == 0) barrier_arrive(bar);
  }

  // Where a column of h stands: see arranged_place in ops/mxfp4/triton.py
  static DEV int arranged(int c) { return c / 128 * 128 + c % 4 * 32 + c % 128 / 8 * 2 + c % 8 / 4; }

  template <bool SITU>
  DEV void store_hidden(const float (&acc)[MT][NT][4], const Tile& t) const {
#pragma unroll
    for (int m = 0; m < MT; m++) {
      const int column = arranged(t.block * (ROWS / 2) + (warp * MT + m) * 8 + lane / 4);
#pragma unroll
      for (int n = 0; n < NT; n++) {
        if (n * 8 >= t.held) break;
        const float* d = acc[m][n];
        const int token = n * 8 + lane % 4 * 2;
        const uint32_t h = activate<SITU>(pack_bf16(d[0], d[1]), pack_bf16(d[2], d[3]), p.activation);
        uint16_t* const to = p.out + (int64_t)(t.first + token) * p.width + column;
        if (token < t.held) to[0] = (uint16_t)h;
        if (token + 1 < t.held) to[p.width] = (uint16_t)(h >> 16);
      }
    }
  }

  // Transposed in registers, so that a lane has two rows of one token
  DEV void store_out(const float (&acc)[MT][NT][4], const Tile& t, const int (&pair)[NT]) const {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const float* d = acc[m][n];
        const uint32_t upper = transpose_8x8(pack_bf16(d[0], d[1])), lower = transpose_8x8(pack_bf16(d[2], d[3]));
        const int column = t.block * ROWS + (warp * MT + m) * 16 + lane % 4 * 2;
        uint16_t* const to = p.out + (int64_t)pair[n] * p.width + column;
        if (n * 8 + lane / 4 < t.held)
          *reinterpret_cast<uint32_t*>(to) = upper, *reinterpret_cast<uint32_t*>(to + 8) = lower;
      }
  }

  DEV void consume() const {
    float acc[MT][NT][4];
    Place at{0, 0};
    Tile t = tile(blockIdx.x);
    int slot = 0;
    for (int i = blockIdx.x + gridDim.x; t.expert >= 0; i += gridDim.x) {
      const Tile next = tile(i);
      int pair[NT] = {};
      if constexpr (!GATE_UP) {  // asked for here, needed behind the products
#pragma unroll
        for (int n = 0; n < NT; n++)
          if (n * 8 + lane / 4 < t.held) pair[n] = p.order[t.first + n * 8 + lane / 4];
      }
      multiply_tile(acc, at, slot);
      if constexpr (!GATE_UP) store_out(acc, t, pair);
      else if (p.activation.situ) store_hidden<true>(acc, t);
      else store_hidden<false>(acc, t);
      if (++slot == p.slots_of_scales) slot = 0;
      t = next;
    }
  }

  DEV void run() {
    set_up();
    if (warp == WARPS) {
      // before the wait: every program of the kernel before this one (arranging x, or gate-up) waited before it let
      // this one start, so the sort, which came before that kernel, has ended, and with it all that wrote weights
      if (lane == 0) load_weights();
      return;
    }
    wait_for_previous();
    if (warp < WARPS) return consume();
    if (lane == 0) launch_dependents();
    load_rows();
  }
};

template <bool GATE_UP, int NT>
__global__ void __launch_bounds__((WARPS + 2) * 32, CTAS) few_kernel(const __grid_constant__ FewParams p) {
  Few<GATE_UP, NT>(p, &smem_base<char>()).run();
}
