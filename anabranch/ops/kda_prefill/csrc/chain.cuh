// Second kernel of the chunked prefill for Hopper: what triton_chain.py computes, chunk after chunk.
//
// A CTA owns 64 value rows of one head of one segment; its consumer warpgroup carries them, S [value,
// key] in fp32 registers. Every left operand of a product is made in registers from what the warpgroup just computed,
// every right one is a tile that the producer warp brought by TMA. Products are ordered so that the tensor cores work
// while results are packed: X = V - S Kd^T; half of o = S Qd^T; U = beta X T^T; the other half; S <- S dec + U Kg;
// o += U R^T, beside which the next chunk begins. Storer warps write o from shared memory.
#pragma once
#ifdef ANABRANCH_EMULATE
#include "hopper.h"
#else
#include "prefill_ptx.cuh"
#include "wgmma_rows.cuh"
#endif
#include "layout.cuh"

struct ChainMaps {
  CUtensorMap wide, square, v;  // [places * 256, 128] and [places * 512, 64] views of tiles; v [T, heads * D]
};

// Strides are in elements.
struct ChainParams {
  const float* scales;           // [chunks, heads, SCALES]
  const int64_t *offsets, *slots, *saves;  // [segments + 1], [segments], [chunks] or null
  void* state;                   // [slots, heads, D(value), D(key)] fp32 or bf16
  uint16_t* out;                 // [T, heads, D]
  int64_t o_stride, slot_stride, save_stride, state_pitch;
  int bf16_state;
};

struct ChainSmem {
  static constexpr int STAGES = 3;
  static constexpr int BLOCK = 3 * CHUNK * 128;  // Kd, Qd, Kg, 64 of their 128 channels
  struct Stage {
    char wide[2 * BLOCK], T[CHUNK * 128], R[CHUNK * 128], v[CHUNK * 128];
  };
  static constexpr int STAGE_BYTES = sizeof(Stage) + SCALES * 4;
  Stage stages[STAGES];
  char o[CHUNK * 128];
  float scales[STAGES][SCALES];
  uint64_t full[STAGES], empty[STAGES], o_full, o_empty;
};

struct Chain {
  using Smem = ChainSmem;
  static constexpr int STAGES = Smem::STAGES, THREADS = 256;
  static_assert(sizeof(Smem) <= 232448 && sizeof(Smem::Stage) % 1024 == 0);

  const ChainParams& p;
  const ChainMaps& maps;
  Smem& s;
  int tid, lane, warp, head, half;  // half: which 64 value rows
  int64_t first, end, place, slot;  // place: of the first chunk
  int steps;

  DEV Chain(const ChainParams& p, const ChainMaps& maps, Smem& s) : p(p), maps(maps), s(s) {
    tid = threadIdx.x, lane = tid % 32, warp = shuffle(tid / 32, 0);
    half = blockIdx.x, head = blockIdx.y;
  }

  DEV void find_segment() {
    const int segment = blockIdx.z;
    int before = 0;
    for (int i = lane; i < segment; i += 32) before += (int)((p.offsets[i + 1] - p.offsets[i] + CHUNK - 1) / CHUNK);
#pragma unroll
    for (int m = 1; m < 32; m *= 2) before += shuffle(before, lane ^ m);
    first = p.offsets[segment], end = p.offsets[segment + 1], slot = p.slots[segment * p.slot_stride];
    steps = (int)((end - first + CHUNK - 1) / CHUNK), place = before;
  }

  DEV void no_slot() const {
    for (int64_t i = tid; i < (end - first) * 8; i += THREADS)
      *reinterpret_cast<uint4*>(p.out + (first + i / 8) * p.o_stride + head * D + half * 64 + i % 8 * 8) =
          make_uint4(0, 0, 0, 0);
  }

  DEV void set_up() {
    if (tid == 0) {
      for (int i = 0; i < STAGES; i++) {
        barrier_init(shared_address(&s.full[i]), 1);
        barrier_init(shared_address(&s.empty[i]), 4);
      }
      barrier_init(shared_address(&s.o_full), 4);
      barrier_init(shared_address(&s.o_empty), 1);
      barrier_init_done();
    }
    __syncthreads();
  }

  // --- producer and storers -----------------------------------------------------------------------------------------

  DEV void produce() {
    wait_for_previous();
    int stage = 0;
    uint32_t phase = 1;
    for (int n = 0; n < steps; n++) {
      const uint32_t full = shared_address(&s.full[stage]);
      Smem::Stage& to = s.stages[stage];
      const int64_t at = (place + n) * gridDim.y + head;
      barrier_wait(shared_address(&s.empty[stage]), phase);
      barrier_expect(full, Smem::STAGE_BYTES);
      tma_load(shared_address(to.v), &maps.v, (int)first + n * CHUNK, 2 * head + half, full, kEvictFirst);
      tma_load(shared_address(to.wide), &maps.wide, (int)at * (PLACE / 128), 0, full, kEvictFirst);
      tma_load(shared_address(to.T), &maps.square, (int)at * (PLACE / 64) + 6 * CHUNK, 0, full, kEvictFirst);
      copy_bulk(shared_address(s.scales[stage]), p.scales + at * SCALES, SCALES * 4, full);
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
  }

  DEV void store() {
    for (int n = 0; n < steps; n++) {
      const int64_t from = first + n * CHUNK;
      const int live = end - from < CHUNK ? (int)(end - from) : CHUNK;
      uint16_t* to = p.out + (from + lane / 8) * p.o_stride + head * D + half * 64 + lane % 8 * 8;
      barrier_wait(shared_address(&s.o_full), n & 1);
#pragma unroll 4
      for (int row = lane / 8; row < live; row += 4, to += 4 * p.o_stride)  // 16 bytes a lane
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(s.o + square_at(row, lane % 8));
      __syncwarp();
      if (lane == 0) barrier_arrive(shared_address(&s.o_empty));
    }
  }

  // --- consumers ----------------------------------------------------------------------------------------------------

  // S[4 j ..]: row lane / 4, columns 8 j + lane % 4 * 2 and the next; the same of the row 8 further
  DEV int64_t state_at(int64_t slot) const {
    return slot * p.state_pitch + (head * D + half * 64 + warp * 16 + lane / 4) * D + lane % 4 * 2;
  }
  DEV void load_state(float (&S)[64]) const {
    const int64_t at = state_at(slot);
#pragma unroll
    for (int i = 0; i < 32; i++) {
      const int64_t e = at + i % 2 * 8 * D + i / 2 * 8;
      if (p.bf16_state) {
        const uint32_t x = *reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(p.state) + e);
        S[2 * i] = bf16_low(x), S[2 * i + 1] = bf16_high(x);
      } else {
        const float2 x = *reinterpret_cast<const float2*>(static_cast<const float*>(p.state) + e);
        S[2 * i] = x.x, S[2 * i + 1] = x.y;
      }
    }
  }
  DEV void store_state(const float (&S)[64], int64_t to) const {
    const int64_t at = state_at(to);
#pragma unroll
    for (int i = 0; i < 32; i++) {
      const int64_t e = at + i % 2 * 8 * D + i / 2 * 8;
      const float x = S[2 * i], y = S[2 * i + 1];
      if (p.bf16_state) *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.state) + e) = pack_bf16(x, y);
      else *reinterpret_cast<float2*>(static_cast<float*>(p.state) + e) = make_float2(x, y);
    }
  }

  // Where this lane's row of a 16 x 16 corner of a token-major tile lies, for transposing loads and stores.
  DEV uint32_t corner(const char* tile, int j) const {
    return shared_address(tile) + square_at(j * 16 + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
  }

  DEV void load_values(float (&X)[32], const char* tile, int live) const {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      uint32_t r[4];
      load_matrices<4, true>(r, corner(tile, j));
#pragma unroll
      for (int i = 0; i < 4; i++) X[8 * j + 2 * i] = bf16_low(r[i]), X[8 * j + 2 * i + 1] = bf16_high(r[i]);
    }
    if (live < CHUNK) {  // what follows a segment may be NaN
#pragma unroll
      for (int i = 0; i < 32; i++) X[i] = i / 4 * 8 + lane % 4 * 2 + i % 2 < live ? X[i] : 0.f;
    }
  }

  DEV void put_out(const float (&O)[32], int n) {
    barrier_wait(shared_address(&s.o_empty), (n & 1) ^ 1);
#pragma unroll
    for (int j = 0; j < 4; j++)
      store_matrices_transposed(corner(s.o, j), pack_bf16(O[8 * j], O[8 * j + 1]),
                                pack_bf16(O[8 * j + 2], O[8 * j + 3]), pack_bf16(O[8 * j + 4], O[8 * j + 5]),
                                pack_bf16(O[8 * j + 6], O[8 * j + 7]));
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&s.o_full));
  }

  // A chunk's o is complete and nothing reads its tiles any more.
  DEV void finish(const float (&O)[32], int n, int stage) {
    if (lane == 0) barrier_arrive(shared_address(&s.empty[stage]));
    put_out(O, n);
  }

  // Step k of 16 channels in a tile of [64 tokens, 128 channels]
  static DEV uint64_t channels(uint32_t tile, int k) { return wgmma_operand(tile + k / 4 * Smem::BLOCK + k % 4 * 32); }

  DEV void consume() {
    float S[64], X[32], O[32];
    uint32_t S16[32], P[16];
    load_state(S);
#pragma unroll
    for (int i = 0; i < 32; i++) O[i] = 0.f;
    wait_for_previous();  // which also stored what `saves` and `out` held before
    int stage = 0, before = 0;
    uint32_t phase = 0;
    for (int n = 0; n < steps; n++) {
      Smem::Stage& t = s.stages[stage];
      const float2* const scales = reinterpret_cast<const float2*>(s.scales[stage]) + lane % 4;
      const uint32_t wide = shared_address(t.wide);
      barrier_wait(shared_address(&s.full[stage]), phase);
      const int64_t rest = end - first - n * CHUNK;
      load_values(X, t.v, rest < CHUNK ? (int)rest : CHUNK);
#pragma unroll
      for (int i = 0; i < 32; i++) S16[i] = pack_bf16(S[2 * i], S[2 * i + 1]);
#pragma unroll
      for (int j = 0; j < 16; j++) {
        const float2 dec = scales[4 * j];
        S[4 * j] *= dec.x, S[4 * j + 1] *= dec.y, S[4 * j + 2] *= dec.x, S[4 * j + 3] *= dec.y;
      }
      wgmma_wait<0>();
      pin(O);
      pin(X);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 8; k++) wgmma<true, true>(X, S16 + 4 * k, channels(wide, k));
      wgmma_commit();
      if (n > 0) finish(O, n - 1, before);
      wgmma_fence();
      wgmma<false>(O, S16, channels(wide + CHUNK * 128, 0));
#pragma unroll
      for (int k = 1; k < 4; k++) wgmma<true>(O, S16 + 4 * k, channels(wide + CHUNK * 128, k));
      wgmma_commit();
      wgmma_wait<1>();
      pin(X);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const float2 beta = scales[D / 2 + 4 * j];
        P[2 * j] = pack_bf16(X[4 * j] * beta.x, X[4 * j + 1] * beta.y);
        P[2 * j + 1] = pack_bf16(X[4 * j + 2] * beta.x, X[4 * j + 3] * beta.y);
      }
      const uint64_t T = wgmma_operand(shared_address(t.T)), R = wgmma_operand(shared_address(t.R));
      wgmma_fence();
      wgmma<false>(X, P, T);
#pragma unroll
      for (int k = 1; k < 4; k++) wgmma<true>(X, P + 4 * k, T + 2 * k);
      wgmma_commit();
#pragma unroll
      for (int k = 4; k < 8; k++) wgmma<true>(O, S16 + 4 * k, channels(wide + CHUNK * 128, k));
      wgmma_commit();
      wgmma_wait<1>();
      pin(X);
#pragma unroll
      for (int i = 0; i < 16; i++) P[i] = pack_bf16(X[2 * i], X[2 * i + 1]);
      const uint64_t Kg = wgmma_operand_by_rows(wide + 2 * CHUNK * 128, Smem::BLOCK);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; k++) wgmma<true, false, true>(S, P + 4 * k, Kg + 128 * k);  // 16 rows of 128 bytes
      wgmma_commit();
#pragma unroll
      for (int k = 0; k < 4; k++) wgmma<true>(O, P + 4 * k, R + 2 * k);
      wgmma_commit();
      wgmma_wait<1>();
      pin(S);
      if (p.saves != nullptr) {
        const int64_t kept = p.saves[(place + n) * p.save_stride];
        if (kept >= 0) store_state(S, kept);
      }
      before = stage;
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    wgmma_wait<0>();
    pin(O);
    finish(O, steps - 1, before);
    store_state(S, slot);
  }

  DEV void run() {
    find_segment();
    if (steps == 0) return;
    if (slot < 0) {
      wait_for_previous();  // the kernel before may still read what the output's memory held
      return no_slot();
    }
    set_up();
    if (warp < 4) consume();
    else if (warp == 4 && lane == 0) produce();
    else if (warp == 5) store();
  }
};

__global__ void __launch_bounds__(Chain::THREADS, 1)
    kda_chain_kernel(const __grid_constant__ ChainParams p, const __grid_constant__ ChainMaps maps) {
  Chain(p, maps, smem_base<ChainSmem>()).run();
}
