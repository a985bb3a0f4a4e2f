// The two products of routed experts for prompts: gate-up with the activation, and down.
//
// Pairs (token, choice) are sorted by expert and cut into tiles of at most MOST (grouped_sort.cuh). A program stays on
// its multiprocessor and walks through pieces: 128 weight rows of one tile's expert against all its pairs. As in the
// Triton kernels weight rows are the 64-row side of wgmma and pairs the other, K is summed in ascending order in one
// accumulator, and eight rows of gate take turns with eight of up, so that eight products of each lie side by side.
//
// A ring of stages of 64 columns, filled by TMA: rows of h are sorted as they are made, rows of x by a launch of its
// own, for gathered row by row they come slower than the tensor cores take them. Two warpgroups multiply, 64 weight
// rows each. They leave a piece's sums in shared memory as bf16 and go on, and three warps apply the activation and
// write rows of `out` meanwhile; in `down` of the larger tiles each writes its own rows instead (has_storers), one two
// stages ahead of the other. A tile of n pairs costs the tensor cores n rounded up to 16.
#pragma once
#ifdef ANABRANCH_EMULATE
#include "grouped.h"
#else
#include "grouped_ptx.cuh"
#include "wgmma.cuh"
#endif
#include "activation.cuh"
#include "grouped_params.cuh"
#include "pieces.cuh"

template <bool GATE_UP, int MOST>
struct Grouped {
  using Smem = GroupedSmem<GATE_UP, MOST>;
  static constexpr int STAGES = Smem::STAGES, LEFT = Smem::LEFT;
  static constexpr bool HAS_STORERS = Smem::HAS_STORERS, WIDE = MOST > SMALL_MOST;  // WIDE: takes wide boxes
  static_assert(sizeof(Smem) <= 232448 && sizeof(typename Smem::Stage) % 1024 == 0 && MOST % UNIT == 0);
  static_assert(HAS_STORERS || !GATE_UP, "the activation is the storers'");
  static constexpr int PITCH = HAS_STORERS ? ROWS * 2 : ROWS;          // bytes of a pair in `sums`
  static constexpr int PIECES = PITCH / (GATE_UP ? 32 : 16);           // of 16 bytes that they make of a row of `out`
  static constexpr int PASS = (HAS_STORERS ? STORERS : 128) / PIECES;  // rows stored at once
  static constexpr int MANY = !HAS_STORERS ? MOST / PASS : GATE_UP ? 2 : 8;  // places that a thread asks for at once
  static constexpr int LEAD = 2;  // stages by which the first warpgroup begins earlier where there are no storers
  static_assert(LEAD < STAGES, "the first warpgroup needs its lead before the second gives a stage back");
  // a CTA of 384 threads starts with 168 registers each; what consumers take the others must have given
  static constexpr int CONSUMER_REGISTERS = 216, PRODUCER_REGISTERS = 72;
  static_assert(2 * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= 3 * 168);

  const GroupedParams& p;
  Smem& s;
  int tid, lane, warp, steps;

  DEV Grouped(const GroupedParams& p, Smem& s) : p(p), s(s) {
    tid = threadIdx.x, lane = tid % 32, warp = tid / 32, steps = (p.columns + BLOCK - 1) / BLOCK;
  }

  DEV uint32_t full(int stage) const { return shared_address(&s.full[stage]); }
  DEV uint32_t empty(int stage) const { return shared_address(&s.empty[stage]); }
  DEV uint32_t made() const { return shared_address(&s.made); }
  DEV uint32_t stored() const { return shared_address(&s.stored); }

  DEV void set_up() {
    if (tid == 0) {
      for (int i = 0; i < STAGES; i++) barrier_init(full(i), 1), barrier_init(empty(i), CONSUMERS / 32);
      barrier_init(made(), CONSUMERS / 32), barrier_init(stored(), STORERS / 32);
      barrier_init_done();
    }
    __syncthreads();
  }

  DEV Tile tile(int i) const { return tile_at(p, i); }

  DEV void load_weights(const Tile& t, int step, int stage) const {
    const uint32_t to = shared_address(s.stages[stage].w);
    if constexpr (GATE_UP)
      load_box(to, p.weights, step * BLOCK, 0, 0, t.block * (ROWS / 16), t.expert, full(stage), kEvictFirst);
    else load_box(to, p.weights, step * BLOCK, t.block * ROWS, t.expert, 0, 0, full(stage), kEvictFirst);
  }

  // --- the producer --------------------------------------------------------------------------------------------------

  // One thread asks for everything. Places are counted in whole boxes: the compiler keeps such sums in uniform
  // registers, from which TMA takes them. With a minimum among them it moves all operands of every box there.
  DEV void load() {
    Place at{0, 1};
    Tile t = tile(blockIdx.x);
    for (int i = blockIdx.x + gridDim.x; t.expert >= 0; i += gridDim.x) {
      const Tile next = tile(i);
      const int boxes = (t.held + BOX - 1) / BOX, wide = WIDE ? t.held / WIDE_BOX : 0;
      for (int step = 0; step < steps; step++, at.next(STAGES)) {
        barrier_wait(empty(at.stage), at.phase);
        barrier_expect(full(at.stage), ROWS * 128 + boxes * BOX * 128);
        load_weights(t, step, at.stage);
        const uint32_t to = shared_address(s.stages[at.stage].x);
        for (int b = 0; b < wide; b++)
          load_box(to + b * WIDE_BOX * 128, p.wide, step * BLOCK, t.first + b * WIDE_BOX, 0, 0, 0, full(at.stage),
                   kEvictNormal);
        for (int b = wide * (WIDE_BOX / BOX); b < boxes; b++)
          load_box(to + b * BOX * 128, p.rows, step * BLOCK, t.first + b * BOX, 0, 0, 0, full(at.stage), kEvictNormal);
      }
      t = next;
    }
  }

  // --- consumers -----------------------------------------------------------------------------------------------------

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
      at.next(STAGES);
    }
    wgmma_wait<0>();
    pin(acc);
    release(before);
  }

  // For a tile of `units` times UNIT pairs
  template <int LOW = 1, int HIGH = MOST / UNIT>
  DEV void multiply_tile(float (&acc)[MOST / 2], int units, int group, Place& at) const {
    constexpr int MIDDLE = (LOW + HIGH) / 2;
    if constexpr (LOW == HIGH) multiply<LOW * UNIT>(acc, group, at);
    else if (units <= MIDDLE) multiply_tile<LOW, MIDDLE>(acc, units, group, at);
    else multiply_tile<MIDDLE + 1, HIGH>(acc, units, group, at);
  }

  // Byte of weight rows 8 * piece to 8 * piece + 7 of a pair: eight pairs at one piece meet every bank.
  static DEV int sums_at(int pair, int piece) { return pair * PITCH + ((piece ^ (pair & 7)) << 4); }

  // The sums of LEFT pairs from `from`. A warp has 16 weight rows, two pieces of each pair, 16 pairs at once.
  DEV void leave(const float (&acc)[MOST / 2], const char* sums, int from, int held) const {
    const int piece = (HAS_STORERS ? warp : warp % 4) * 2 + lane / 16;
    const uint32_t to = shared_address(sums) + sums_at(lane % 16, piece);
#pragma unroll
    for (int i = 0; i < LEFT && from + i < MOST; i += 16) {
      if (from + i >= held) break;
      const float* a = acc + (from + i) / 2;
      store_matrices_transposed(to + i * PITCH, pack_bf16(a[0], a[1]), pack_bf16(a[4], a[5]), pack_bf16(a[2], a[3]),
                                pack_bf16(a[6], a[7]));
    }
  }

  // Without storers: a warpgroup's rows of `out`, LEFT pairs at a time, 16 bytes a thread.
  DEV void store_own(const float (&acc)[MOST / 2], const Tile& t, int group, const int (&place)[MANY]) const {
    const char* const sums = s.sums + group * LEFT * PITCH;
    const int row = tid % 128 / PIECES, piece = tid % PIECES, column = ((t.block * 2 + group) * PIECES + piece) * 8;
#pragma unroll
    for (int from = 0; from < MOST; from += LEFT) {
      if (from >= t.held) break;
      leave(acc, sums, from, t.held);
      named_barrier(1 + group, 128);
#pragma unroll
      for (int i = 0; i < LEFT && from + i < MOST; i += PASS)
        if (from + i + row < t.held && column < p.width)
          *reinterpret_cast<uint4*>(p.out + (int64_t)place[(from + i) / PASS] * p.width + column) =
              *reinterpret_cast<const uint4*>(sums + sums_at(i + row, piece));
      named_barrier(1 + group, 128);
    }
  }

  DEV void consume(int group) {
    float acc[MOST / 2];
    Place at{0, 0};
    uint32_t phase = 1;
    Tile t = tile(blockIdx.x);
    if constexpr (!HAS_STORERS)  // one stores its rows while the other multiplies: a lead, once there, stays
      if (group == 1 && t.expert >= 0 && steps > LEAD) barrier_wait(full(LEAD), 0);
    for (int i = blockIdx.x + gridDim.x; t.expert >= 0; i += gridDim.x, phase ^= 1) {
      const Tile next = tile(i);
      int place[MANY] = {};
      if constexpr (!HAS_STORERS) {  // asked for here, needed behind the products
#pragma unroll
        for (int j = 0; j < MANY; j++) {
          const int row = j * PASS + tid % 128 / PIECES;
          if (row < t.held) place[j] = p.order[t.first + row];
        }
      }
      multiply_tile(acc, (t.held + UNIT - 1) / UNIT, group, at);
      if constexpr (HAS_STORERS) {
        barrier_wait(stored(), phase);
        leave(acc, s.sums, 0, t.held);
        __syncwarp();
        if (lane == 0) barrier_arrive(made());
      } else {
        store_own(acc, t, group, place);
      }
      t = next;
    }
  }

  // --- storers -------------------------------------------------------------------------------------------------------

  // Rows of `out` from a piece's sums, 16 bytes a thread, `MANY` rows at once: `order` is far away.
  template <bool SITU>
  DEV void store(const Tile& t) const {
    const int me = tid - CONSUMERS - 32, piece = me % PIECES, column = (t.block * PIECES + piece) * 8;
    if (column >= p.width) return;
    for (int from = me / PIECES; from < t.held; from += MANY * PASS) {
      int64_t place[MANY];
#pragma unroll
      for (int i = 0; i < MANY; i++) {
        const int row = from + i * PASS;
        place[i] = row >= t.held ? -1 : GATE_UP ? t.first + row : p.order[t.first + row];
      }
#pragma unroll
      for (int i = 0; i < MANY; i++) {
        if (place[i] < 0) continue;
        const int row = from + i * PASS;
        uint4 out = *reinterpret_cast<const uint4*>(s.sums + sums_at(row, GATE_UP ? piece * 2 : piece));
        if constexpr (GATE_UP) {
          const uint4 up = *reinterpret_cast<const uint4*>(s.sums + sums_at(row, piece * 2 + 1));
          out = {activate<SITU>(out.x, up.x, p.activation), activate<SITU>(out.y, up.y, p.activation),
                 activate<SITU>(out.z, up.z, p.activation), activate<SITU>(out.w, up.w, p.activation)};
        }
        *reinterpret_cast<uint4*>(p.out + place[i] * p.width + column) = out;
      }
    }
  }

  DEV void store_all() const {
    uint32_t phase = 0;
    Tile t = tile(blockIdx.x);
    for (int i = blockIdx.x + gridDim.x; t.expert >= 0; i += gridDim.x, phase ^= 1) {
      const Tile next = tile(i);
      barrier_wait(made(), phase);
      if (GATE_UP && p.activation.situ) store<true>(t);
      else store<false>(t);
      __syncwarp();
      if (lane == 0) barrier_arrive(stored());
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
      else if (HAS_STORERS && warp > CONSUMERS / 32) store_all();
    }
  }
};

template <bool GATE_UP, int MOST>
__global__ void __launch_bounds__(CONSUMERS + PRODUCERS, 1) grouped_kernel(const __grid_constant__ GroupedParams p) {
  Grouped<GATE_UP, MOST>(p, smem_base<GroupedSmem<GATE_UP, MOST>>()).run();
}
