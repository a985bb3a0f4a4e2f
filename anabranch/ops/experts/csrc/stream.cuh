// The two products of routed experts for few pairs an expert, at memory speed: gate-up with the activation, and down.
//
// Pairs (token, choice) are sorted by expert and cut into tiles of at most 64 (ops/experts/tiles.py). A program
// stays on its multiprocessor and walks through pieces: 128 weight rows of one tile's expert against all its pairs.
// Weights cross memory once, by TMA into a ring of stages that never drains between pieces; rows of x or h, which lie
// in the second-level cache, come beside them in pieces of 16 bytes, as a gather has no boxes.
//
// Weight rows are the 64-row side of wgmma and pairs the other, K is summed in ascending order in one accumulator, and
// eight rows of gate take turns with eight of up, so that a thread holds both sides of a GLU: the bits of the Triton
// kernels. A tile of n pairs is multiplied as 8, 16, 32 or 64.
#pragma once
#ifdef ANABRANCH_EMULATE
#include "stream.h"
#else
#include "stream_ptx.cuh"
#endif
#include "activation.cuh"
#include "pieces.cuh"

struct StreamParams {
  Map weights;
  const uint16_t* x;                  // x [T, K] or h [P, K]
  uint16_t* out;                      // h [P, N] in sorted order, or [P, N] in the order of pairs
  const int *order, *table;           // [P] and [3, slots]: expert, first and stop of each tile
  int64_t x_stride;
  int slots, blocks, columns, width;  // blocks: pieces of a tile; columns: K; width: N
  int top_k;
  Activation activation;
};

template <bool GATE_UP>
struct Stream {
  static constexpr int ROWS = 128, BLOCK = 64;  // weight rows a piece, columns a stage
  // pairs of a tile: 16 or 32 are no faster where they suffice, though the ring is deeper then, and slower elsewhere
  static constexpr int TOKENS = 64;
  static constexpr int CONSUMERS = 256, GATHERERS = 64, THREADS = CONSUMERS + GATHERERS + 32;
  static constexpr int GATHERED = TOKENS / 8;  // rows of a gatherer, which has 16 bytes of each
  struct Stage {
    char w[ROWS * 128], x[TOKENS * 128];
  };
  static constexpr int STAGES = (232448 - 256) / sizeof(Stage);  // all that fit beside the barriers
  struct Smem {
    Stage stages[STAGES];
    uint64_t full[STAGES], empty[STAGES];
  };
  static_assert(sizeof(Smem) <= 232448 && sizeof(Stage) % 1024 == 0);

  const StreamParams& p;
  Smem& s;
  int tid, lane, warp, steps;

  DEV Stream(const StreamParams& p, Smem& s) : p(p), s(s) {
    tid = threadIdx.x, lane = tid % 32, warp = tid / 32, steps = (p.columns + BLOCK - 1) / BLOCK;
  }

  DEV uint32_t full(int stage) const { return shared_address(&s.full[stage]); }
  DEV uint32_t empty(int stage) const { return shared_address(&s.empty[stage]); }

  DEV void set_up() {
    if (tid == 0) {
      for (int i = 0; i < STAGES; i++) barrier_init(full(i), 1 + GATHERERS), barrier_init(empty(i), CONSUMERS / 32);
      barrier_init_done();
    }
    __syncthreads();
  }

  DEV Tile tile(int i) const { return tile_at(p, i); }

  // --- producers ----------------------------------------------------------------------------------------------------

  DEV void load_weights() const {
    Place at{0, 1};
    Tile t = tile(blockIdx.x);
    for (int i = blockIdx.x + gridDim.x; t.expert >= 0; i += gridDim.x) {
      const Tile next = tile(i);
      for (int step = 0; step < steps; step++, at.next(STAGES)) {
        const uint32_t bar = full(at.stage), to = shared_address(s.stages[at.stage].w);
        barrier_wait(empty(at.stage), at.phase);
        barrier_expect(bar, ROWS * 128);
        if constexpr (GATE_UP)
          load_box(to, p.weights, step * BLOCK, 0, 0, t.block * (ROWS / 16), t.expert, bar, kEvictFirst);
        else load_box(to, p.weights, step * BLOCK, t.block * ROWS, t.expert, 0, 0, bar, kEvictFirst);
      }
      t = next;
    }
  }

  // This thread's 16 bytes of every 128 of its rows
  DEV void find(const uint16_t* (&from)[GATHERED], const Tile& t, int row, int piece) const {
#pragma unroll
    for (int j = 0; j < GATHERED; j++, row += 8) {
      from[j] = p.x + piece * 8;
      if (t.expert >= 0 && row < t.held)
        from[j] += (GATE_UP ? p.order[t.first + row] / p.top_k : t.first + row) * p.x_stride;
    }
  }
  DEV void gather() const {
    const int me = tid - CONSUMERS, row = me / 8, piece = me % 8;
    const uint32_t swizzled = row * 128 + ((piece ^ row) << 4);  // as TMA has it
    Place at{0, 1};
    Tile t = tile(blockIdx.x);
    const uint16_t *from[GATHERED], *next_from[GATHERED];
    find(from, t, row, piece);
    for (int i = blockIdx.x + gridDim.x; t.expert >= 0; i += gridDim.x) {
      const Tile next = tile(i);
      find(next_from, next, row, piece);
      for (int step = 0; step < steps; step++, at.next(STAGES)) {
        const uint32_t to = shared_address(s.stages[at.stage].x) + swizzled;
        const int column = step * BLOCK, bytes = column + piece * 8 < p.columns ? 16 : 0;  // zeros behind the last
        barrier_wait(empty(at.stage), at.phase);
#pragma unroll
        for (int j = 0; j < GATHERED; j++)
          if (row + j * 8 < t.held) copy_async(to + j * 8 * 128, bytes ? from[j] + column : from[j], bytes);
        arrive_behind_copies(full(at.stage));
      }
#pragma unroll
      for (int j = 0; j < GATHERED; j++) from[j] = next_from[j];
      t = next;
    }
  }

  // --- consumers ----------------------------------------------------------------------------------------------------

  // All of K for 64 weight rows. What lies behind the pairs of a tile is old and spoils no other column.
  template <int N>
  DEV void multiply(float (&acc)[N / 2], int group, Place& at) const {
#pragma unroll
    for (int i = 0; i < N / 2; i++) acc[i] = 0.f;
    for (int step = 0; step < steps; step++, at.next(STAGES)) {
      barrier_wait(full(at.stage), at.phase);
      copies_to_wgmma();
      const uint64_t w = wgmma_operand(shared_address(s.stages[at.stage].w) + group * 64 * 128);
      const uint64_t x = wgmma_operand(shared_address(s.stages[at.stage].x));
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; k++) Wgmma<N>::mma(acc, w + 2 * k, x + 2 * k, 1);
      wgmma_commit();
      wgmma_wait<0>();
      if (lane == 0) barrier_arrive(empty(at.stage));
    }
    pin(acc);
  }

  // Transposed in registers, so that a lane has two columns of one pair, whose row of `out` is `place`
  template <bool SITU>
  DEV void store_hidden(const float* d, bool held, int place, int block, int rows) const {
    const uint32_t h = transpose_8x8(activate<SITU>(pack_bf16(d[0], d[1]), pack_bf16(d[2], d[3]), p.activation));
    const int column = block * (ROWS / 2) + rows / 2 + lane % 4 * 2;
    if (held && column < p.width) *reinterpret_cast<uint32_t*>(p.out + (int64_t)place * p.width + column) = h;
  }
  DEV void store_out(const float* d, bool held, int place, int block, int rows) const {
    const uint32_t upper = transpose_8x8(pack_bf16(d[0], d[1])), lower = transpose_8x8(pack_bf16(d[2], d[3]));
    const int column = block * ROWS + rows + lane % 4 * 2;
    uint16_t* const to = p.out + (int64_t)place * p.width + column;
    if (held && column < p.width) *reinterpret_cast<uint32_t*>(to) = upper;
    if (held && column + 8 < p.width) *reinterpret_cast<uint32_t*>(to + 8) = lower;
  }

  template <int N>
  DEV void multiply_and_store(const Tile& t, int group, Place& at) const {
    float acc[N / 2];
    multiply<N>(acc, group, at);
    const int rows = group * 64 + warp % 4 * 16;
    int place[N / 8];
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
      const int pair = n * 8 + lane / 4;
      place[n] = t.first + pair;
      if (!GATE_UP && pair < t.held) place[n] = p.order[place[n]];
    }
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
      if (n * 8 >= t.held) break;
      const bool held = n * 8 + lane / 4 < t.held;
      if constexpr (!GATE_UP) store_out(acc + n * 4, held, place[n], t.block, rows);
      else if (p.activation.situ) store_hidden<true>(acc + n * 4, held, place[n], t.block, rows);
      else store_hidden<false>(acc + n * 4, held, place[n], t.block, rows);
    }
  }
  template <int N = 8>
  DEV void multiply_tile(const Tile& t, int group, Place& at) const {
    if constexpr (N == TOKENS) multiply_and_store<N>(t, group, at);
    else if (t.held <= N) multiply_and_store<N>(t, group, at);
    else multiply_tile<2 * N>(t, group, at);
  }

  DEV void consume(int group) const {
    Place at{0, 0};
    Tile t = tile(blockIdx.x);
    for (int i = blockIdx.x + gridDim.x; t.expert >= 0; i += gridDim.x) {
      const Tile next = tile(i);
      multiply_tile(t, group, at);
      t = next;
    }
  }

  DEV void run() {
    set_up();
    // the table was complete before the kernel before `down` began, but the one before gate-up makes it
    if (GATE_UP || tid < CONSUMERS + GATHERERS) wait_for_previous();
    if (tid < CONSUMERS) {
      consume(warp / 4);
    } else if (tid < CONSUMERS + GATHERERS) {
      if (tid == CONSUMERS) launch_dependents();
      gather();
    } else if (lane == 0) {
      load_weights();
    }
  }
};

template <bool GATE_UP>
__global__ void __launch_bounds__(Stream<GATE_UP>::THREADS, 1) stream_kernel(const __grid_constant__ StreamParams p) {
  using Kernel = Stream<GATE_UP>;
  Kernel(p, smem_base<typename Kernel::Smem>()).run();
}
