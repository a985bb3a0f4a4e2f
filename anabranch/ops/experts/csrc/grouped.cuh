// The two products of routed experts for prompts: gate-up with the activation, and down.
//
// Pairs (token, choice) are sorted by expert and cut into tiles of at most 256 + 32 (ops/experts/tiles.py). A program
// stays on its multiprocessor and walks through pieces: 128 weight rows of one tile's expert against all its pairs. As
// in the Triton kernels weight rows are the 64-row side of wgmma and pairs the other, K is summed in ascending order in
// one accumulator, and eight rows of gate take turns with eight of up, so that a thread holds both sides of a GLU.
//
// A ring of stages of 64 columns, filled by TMA: rows of h are sorted as they are made, rows of x by a launch of its own,
// for gathered row by row they come slower than the tensor cores take them. Two warpgroups multiply, 64 weight rows
// each. A tile of n pairs costs the tensor cores n rounded up to 32.
#pragma once
#ifdef ANABRANCH_EMULATE
#include "grouped.h"
#else
#include "grouped_ptx.cuh"
#include "grouped_wgmma.cuh"
DEV float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
DEV float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
#endif
#include "grouped_act.cuh"

constexpr int ROWS = 128, MOST = 256 + 32, BLOCK = 64, STAGES = 4;  // weight rows, pairs, columns a stage
constexpr int CONSUMERS = 256, PRODUCERS = 128, BOX = 8192;  // threads; bytes a warpgroup stores from at once
constexpr int LEAD = 2;  // stages by which the first warpgroup begins earlier
static_assert(LEAD < STAGES, "the first warpgroup needs its lead before the second gives a stage back");

struct Box {  // of a tensor, innermost dimension first
  int64_t size[5], pitch[4];  // pitches of dimensions 1 to 4, in elements
  int box[5];
};

struct GroupedParams {
  Map weights, rows;         // rows: of sorted x, or of h
  const int *order, *table;  // [P] and [3, slots]: expert, first and stop of each tile
  uint16_t* out;             // h [P, N] in sorted order, or [P, N] in the order of pairs
  int slots, blocks, columns, width;  // blocks: pieces of a tile; columns: K; width: N
  Activation activation;
};

struct GroupedSmem {
  struct Stage {
    char w[ROWS * 128], x[MOST * 128];
  };
  Stage stages[STAGES];
  char box[2][BOX];
  uint64_t full[STAGES], empty[STAGES];
};
static_assert(sizeof(GroupedSmem) <= 232448 && sizeof(GroupedSmem::Stage) % 1024 == 0);

template <bool GATE_UP>
struct Grouped {
  static constexpr int OUT = GATE_UP ? 32 : 64;  // columns of `out` that a warpgroup makes
  static constexpr int PIECES = OUT / 8, CHUNK = BOX / (OUT * 2), PASS = 128 / PIECES;  // pairs stored at once, a pass
  // a CTA of 384 threads starts with 168 registers each; what consumers take the others must have given
  static constexpr int CONSUMER_REGISTERS = 216, PRODUCER_REGISTERS = 72;
  static_assert(2 * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= 3 * 168);

  struct Tile {
    int expert, first, held, block;
  };
  struct Place {  // in the ring
    int stage = 0;
    uint32_t phase;
    DEV void next() {
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
  };

  const GroupedParams& p;
  GroupedSmem& s;
  int tid, lane, warp, steps;

  DEV Grouped(const GroupedParams& p, GroupedSmem& s) : p(p), s(s) {
    tid = threadIdx.x, lane = tid % 32, warp = tid / 32, steps = (p.columns + BLOCK - 1) / BLOCK;
  }

  DEV uint32_t full(int stage) const { return shared_address(&s.full[stage]); }
  DEV uint32_t empty(int stage) const { return shared_address(&s.empty[stage]); }

  DEV void set_up() {
    if (tid == 0) {
      for (int i = 0; i < STAGES; i++) barrier_init(full(i), 1), barrier_init(empty(i), CONSUMERS / 32);
      barrier_init_done();
    }
    __syncthreads();
  }

  // The i-th piece; expert -1 behind the last.
  DEV Tile tile(int i) const {
    const int slot = i / p.blocks;
    if (slot >= p.slots) return {-1, 0, 0, 0};
    const int first = p.table[p.slots + slot];
    return {p.table[slot], first, p.table[2 * p.slots + slot] - first, i - slot * p.blocks};
  }

  DEV void load_weights(const Tile& t, int step, int stage) const {
    const uint32_t to = shared_address(s.stages[stage].w);
    if constexpr (GATE_UP)
      load_box(to, p.weights, step * BLOCK, 0, 0, t.block * (ROWS / 16), t.expert, full(stage), kEvictFirst);
    else load_box(to, p.weights, step * BLOCK, t.block * ROWS, t.expert, 0, 0, full(stage), kEvictFirst);
  }

  // --- the producer ----------------------------------------------------------------------------------------------------

  // One thread asks for everything; the others of its warpgroup lend their registers.
  DEV void load() {
    Place at{0, 1};
    Tile t = tile(blockIdx.x);
    for (int i = blockIdx.x + gridDim.x; t.expert >= 0; i += gridDim.x) {
      const Tile next = tile(i);
      const int boxes = (t.held + 31) / 32;
      for (int step = 0; step < steps; step++, at.next()) {
        barrier_wait(empty(at.stage), at.phase);
        barrier_expect(full(at.stage), ROWS * 128 + boxes * 32 * 128);
        load_weights(t, step, at.stage);
        for (int b = 0; b < boxes; b++)
          load_box(shared_address(s.stages[at.stage].x) + b * 32 * 128, p.rows, step * BLOCK, t.first + b * 32, 0, 0, 0,
                   full(at.stage), kEvictNormal);
      }
      t = next;
    }
  }

  // --- consumers ----------------------------------------------------------------------------------------------------

  DEV void release(int stage) const {
    if (lane == 0) barrier_arrive(empty(stage));
  }

  // 64 weight rows against N pairs; a stage is released when the next one's products are under way.
  template <int N>
  DEV void multiply(float (&acc)[MOST / 2], int group, Place& at) const {
    constexpr int MAIN = N > 256 ? 256 : N, REST = N - MAIN;
    auto& main = *reinterpret_cast<float(*)[MAIN / 2]>(acc);
    int before = 0;
    for (int step = 0; step < steps; step++) {
      barrier_wait(full(at.stage), at.phase);
      const uint64_t w = wgmma_operand(shared_address(s.stages[at.stage].w) + group * 64 * 128);
      const uint64_t x = wgmma_operand(shared_address(s.stages[at.stage].x));
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; k++) {
        Wgmma<MAIN>::mma(main, w + 2 * k, x + 2 * k, step | k);
        if constexpr (REST > 0) {
          auto& rest = *reinterpret_cast<float(*)[REST / 2]>(acc + MAIN / 2);
          Wgmma<REST>::mma(rest, w + 2 * k, x + MAIN * 128 / 16 + 2 * k, step | k);
        }
      }
      wgmma_commit();
      if (step > 0) {
        wgmma_wait<1>();
        release(before);
      }
      before = at.stage;
      at.next();
    }
    wgmma_wait<0>();
    pin(acc);
    release(before);
  }

  DEV void multiply_tile(float (&acc)[MOST / 2], const Tile& t, int group, Place& at) const {
    switch ((t.held + 31) / 32) {
      case 1: return multiply<32>(acc, group, at);
      case 2: return multiply<64>(acc, group, at);
      case 3: return multiply<96>(acc, group, at);
      case 4: return multiply<128>(acc, group, at);
      case 5: return multiply<160>(acc, group, at);
      case 6: return multiply<192>(acc, group, at);
      case 7: return multiply<224>(acc, group, at);
      case 8: return multiply<256>(acc, group, at);
      default: return multiply<288>(acc, group, at);
    }
  }

  // Byte of 16-byte piece `piece` of pair `row` in a box: eight pairs at one piece, or a pair's pieces, meet every bank.
  static DEV int box_at(int row, int piece) {
    if constexpr (GATE_UP) return row * 64 + ((piece ^ (row >> 1 & 3)) << 4);
    else return row * 128 + ((piece ^ (row & 7)) << 4);
  }

  // The 32 pairs of acc[0 .. 16], as rows of the box from `row`
  template <bool SITU>
  DEV void fill(const float* acc, uint32_t box, int row) const {
    uint32_t low[4], high[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      low[i] = pack_bf16(acc[4 * i], acc[4 * i + 1]), high[i] = pack_bf16(acc[4 * i + 2], acc[4 * i + 3]);
    const int piece = GATE_UP ? warp % 4 : warp % 4 * 2;
    if constexpr (GATE_UP) {
#pragma unroll
      for (int i = 0; i < 4; i++) low[i] = activate<SITU>(low[i], high[i], p.activation);
    } else {
      store_matrices_transposed(box + box_at(row + lane, piece + 1), high[0], high[1], high[2], high[3]);
    }
    store_matrices_transposed(box + box_at(row + lane, piece), low[0], low[1], low[2], low[3]);
  }

  // From registers by way of a box to rows of `out`, `CHUNK` pairs at a time, 16 bytes a thread.
  template <bool SITU>
  DEV void store(const float (&acc)[MOST / 2], const Tile& t, int group, const int (&pair)[MOST / PASS]) const {
    char* const box = s.box[group];
    const int me = tid % 128, row = me / PIECES, piece = me % PIECES;
    const int column = (t.block * 2 + group) * OUT + piece * 8;
#pragma unroll
    for (int from = 0; from < MOST; from += CHUNK) {
      if (from >= t.held) break;
#pragma unroll
      for (int i = 0; i < CHUNK && from + i < MOST; i += 32)
        if (from + i < t.held) fill<SITU>(acc + (from + i) / 2, shared_address(box), i);
      named_barrier(1 + group, 128);
#pragma unroll
      for (int i = 0; i < CHUNK && from + i < MOST; i += PASS)
        if (from + i + row < t.held && column < p.width) {
          const int64_t place = GATE_UP ? t.first + from + i + row : pair[(from + i) / PASS];
          *reinterpret_cast<uint4*>(p.out + place * p.width + column) =
              *reinterpret_cast<const uint4*>(box + box_at(i + row, piece));
        }
      named_barrier(1 + group, 128);
    }
  }

  DEV void consume(int group) {
    float acc[MOST / 2];
    Place at{0, 0};
    Tile t = tile(blockIdx.x);
    // one stores its results while the other multiplies: a lead, once there, stays
    if (group == 1 && t.expert >= 0 && steps > LEAD) barrier_wait(full(LEAD), 0);
    for (int i = blockIdx.x + gridDim.x; t.expert >= 0; i += gridDim.x) {
      const Tile next = tile(i);
      int pair[MOST / PASS] = {};
      if constexpr (!GATE_UP) {  // asked for here, needed behind the products
#pragma unroll
        for (int j = 0; j < MOST / PASS; j++) {
          const int place = j * PASS + tid % 128 / PIECES;
          if (place < t.held) pair[j] = p.order[t.first + place];
        }
      }
      multiply_tile(acc, t, group, at);
      if (GATE_UP && p.activation.situ) store<true>(acc, t, group, pair);
      else store<false>(acc, t, group, pair);
      t = next;
    }
  }

  DEV void run() {
    set_up();
    wait_for_previous();
    if (tid == CONSUMERS) launch_dependents();
    if (warp < CONSUMERS / 32) {
      take_registers<CONSUMER_REGISTERS>();
      consume(warp / 4);
    } else {
      give_registers<PRODUCER_REGISTERS>();
      if (tid == CONSUMERS) load();
    }
  }
};

template <bool GATE_UP>
__global__ void __launch_bounds__(CONSUMERS + PRODUCERS, 1) grouped_kernel(const __grid_constant__ GroupedParams p) {
  Grouped<GATE_UP>(p, smem_base<GroupedSmem>()).run();
}

// Rows of x [T, K] in the order of the pairs in tiles: a block copies some rows of a tile, a warp a row at a time.
struct GatherParams {
  const uint16_t* x;
  const int *order, *table;  // as above
  uint16_t* out;             // [P, K]
  int slots, columns, top_k;
  int64_t x_stride;
};

constexpr int GATHER_WARPS = 8, GATHER_BLOCKS = 4, AHEAD = 9;  // blocks of a tile; pieces of 16 bytes a lane asks for at once

__global__ void __launch_bounds__(GATHER_WARPS * 32) gather_kernel(const __grid_constant__ GatherParams p) {
  wait_for_previous();
  launch_dependents();
  const int slot = blockIdx.x / GATHER_BLOCKS, warp = blockIdx.x % GATHER_BLOCKS * GATHER_WARPS + threadIdx.x / 32;
  const int lane = threadIdx.x % 32, pieces = p.columns / 8;
  if (p.table[slot] < 0) return;  // nothing else is written of an entry behind the last
  const int stop = p.table[2 * p.slots + slot];
  for (int i = p.table[p.slots + slot] + warp; i < stop; i += GATHER_BLOCKS * GATHER_WARPS) {
    const uint4* from = reinterpret_cast<const uint4*>(p.x + p.order[i] / p.top_k * p.x_stride);
    uint4* to = reinterpret_cast<uint4*>(p.out + (int64_t)i * p.columns);
    for (int first = lane; first < pieces; first += AHEAD * 32) {
      uint4 held[AHEAD];
#pragma unroll
      for (int j = 0; j < AHEAD; j++)
        if (first + j * 32 < pieces) held[j] = from[first + j * 32];
#pragma unroll
      for (int j = 0; j < AHEAD; j++)
        if (first + j * 32 < pieces) to[first + j * 32] = held[j];
    }
  }
}
