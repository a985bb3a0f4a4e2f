// y[M, N] = x[M, K] W[N, K]^T for few tokens, with W as E4M3 codes under one fp32 scale for each 128 x 128 block.
//
// Ring, producers, tiles and clusters are those of skinny_gemm/csrc/skinny.cuh with a block of K of 128 columns: 128
// bytes of a weight row, two blocks of x. Consumers read codes from shared memory, widen them to bf16 in registers
// (exactly) and multiply them from there, in the natural order of K. The sum over a block starts at zero and is scaled
// once, into the sum of a part; a thread's rows belong to two groups of eight, and a group lies in one scale block.
//
// Order of addition, that of triton.py: K has four parts of whole blocks, y = ((p0 + p1) + p2) + p3. Of two CTAs the
// first sums p0 + p1 and hands all of it to the second, which holds p2 and p3, adds and stores. So bits depend on a row
// of x, a row of W and K alone.
//
// While the tensor cores multiply one half of a block (64 columns) the next half is widened.
#pragma once
#ifndef ANABRANCH_EMULATE
#include "../skinny_gemm/csrc/skinny.cuh"
#include "coded_ptx.cuh"
#include "coded_wgmma.cuh"
#include "codes.cuh"
#endif

constexpr int kScaleBlock = 128;

struct CodedArgs {
  Args args;
  const float* scale;
  int scale_pitch, scale_rows;
  int scales;  // offset of the scales in shared memory
};

template <int XR, int T, int WGS, int KB>
struct Coded : Skinny<2, XR, T, WGS, KB, false, 2> {
  using Base = Skinny<2, XR, T, WGS, KB, false, 2>;
  using Base::a, Base::warp, Base::lane, Base::rank, Base::first, Base::stages, Base::smem, Base::maps;
  using Base::full, Base::drained, Base::inbox, Base::ring, Base::x_ring, Base::w_stage, Base::kAcc, Base::kItems;
  // Where registers are short the first of two parts waits in the inbox, and producers lend some of theirs.
  static constexpr bool kStash = T * WGS >= 128, kLend = T * WGS >= 256;
  static constexpr int kThreads = WGS * 128 + (kLend ? 128 : 64), kOwnRegisters = 232, kLeft = 40;
  static constexpr int kScaleRows = (WGS + 1) / 2 + 1;  // scale blocks that a tile of 64 WGS rows may touch
  static constexpr uint32_t kHanded = kItems * WGS * 128 * 8;
  static_assert(kItems % 2 == 0);

  const CodedArgs& coded;
  uint32_t handed;
  float* scales;  // [passes, kScaleRows, blocks of this CTA]

  DEVICE Coded(const CodedArgs& c, const Maps& m, char* s) : Base(c.args, m, s), coded(c) {
    handed = this->received + 16;
    scales = reinterpret_cast<float*>(s + c.scales);
  }

  DEVICE void load_scales() const {
    const int each = kScaleRows * a.part;
    for (int i = threadIdx.x; i < a.passes * each; i += WGS * 128) {
      const int row = this->tile_of(i / each).row0 / kScaleBlock + i % each / a.part;
      scales[i] = __ldg(coded.scale + (int64_t)min(row, coded.scale_rows - 1) * coded.scale_pitch + rank * a.part + i % a.part);
    }
    named_barrier(WGS + 1, WGS * 128);
  }

  // 64 columns of codes from `at`, of this thread's rows, as four A operands; a warp may have only its upper eight rows
  static DEVICE void widen(uint32_t at, bool both, uint32_t (&w)[16]) {
    constexpr uint32_t kLower = WGS * 32 * 128;
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int e = 0; e < 2; e++) w[4 * k + 2 * e] = widened(load_two((at ^ (k << 4)) + 8 * e));
    if (both)
#pragma unroll
      for (int k = 0; k < 4; k++)
#pragma unroll
        for (int e = 0; e < 2; e++) w[4 * k + 2 * e + 1] = widened(load_two((at ^ (k << 4)) + 8 * e + kLower));
  }

  static DEVICE void fold(float (&total)[kAcc], const float (&inner)[kAcc], float upper, float lower) {
#pragma unroll
    for (int i = 0; i < kAcc; i++) total[i] = __fmaf_rn(inner[i], i & 2 ? lower : upper, total[i]);
  }

  // total = the sum over the next `blocks` blocks of K, none where K has fewer blocks than parts; their scales come along
  DEVICE void sum_part(int blocks, const Tile& tile, const float* upper, const float* lower, int& slot, uint32_t& phase,
                       int& done, float (&total)[kAcc]) const {
    const bool both = this->first_row(1) < tile.rows;
    const uint32_t offset = (this->first_row(0) + lane / 4) * 128 + lane / 4 * 16 + lane % 4 * 2;
    float inner[kAcc], scale0 = 0.f, scale1 = 0.f;
    uint32_t low[16], high[16];
#pragma unroll
    for (int i = 0; i < kAcc; i++) inner[i] = total[i] = 0.f;
#pragma unroll
    for (int i = 0; i < 16; i++) low[i] = high[i] = 0;
    int previous = 0;
    for (int i = 0; i < blocks; i += KB) {
      barrier_wait(full + 8 * slot, phase);
#pragma unroll
      for (int b = 0; b < KB; b++) {
        const uint32_t w = ring + slot * w_stage + b * tile.rows * 128 + offset;
        const uint32_t x = x_ring + slot * Base::kXStage + b * 2 * T * 128;
        wgmma_wait<1>();
        pin(low);
        widen(w, both, low);
        wgmma_wait<0>();
        pin(inner);
        pin(high);
        fold(total, inner, scale0, scale1);
        if (b == 0 && i > 0) this->release(previous, done);
        scale0 = upper[i + b], scale1 = lower[i + b];
        wgmma_fence();
        multiply<true>(low, x, inner);
        widen(w ^ 64, both, high);
        wgmma_fence();
        multiply<false>(high, x + T * 128, inner);
      }
      previous = slot;
      this->advance(slot, phase);
    }
    wgmma_wait<0>();
    pin(inner);
    pin(low);
    pin(high);
    fold(total, inner, scale0, scale1);
    if (blocks > 0) this->release(previous, done);
  }

  template <bool NEW>
  static DEVICE void multiply(const uint32_t (&w)[16], uint32_t x, float (&inner)[kAcc]) {
    const uint64_t tokens = wgmma_operand(x);
    wgmma<!NEW>(inner, w, tokens);
#pragma unroll
    for (int k = 1; k < 4; k++) wgmma<true>(inner, w + 4 * k, tokens + 2 * k);
    wgmma_commit();
  }

  // Two items (four sums) of this thread in the inbox, or in that of a peer.
  DEVICE uint32_t place(int item) const { return (item * WGS * 128 + threadIdx.x * 2) * 8; }
  DEVICE float4* box(int item) const {
    return reinterpret_cast<float4*>(smem + (inbox - shared_address(smem)) + place(item));
  }
  DEVICE void keep(const float (&sum)[kAcc]) const {
#pragma unroll
    for (int t = 0; t < kItems; t += 2) *box(t) = make_float4(sum[2 * t], sum[2 * t + 1], sum[2 * t + 2], sum[2 * t + 3]);
  }
  DEVICE void fetch(float (&sum)[kAcc]) const {
#pragma unroll
    for (int t = 0; t < kItems; t += 2) {
      const float4 v = *box(t);
      sum[2 * t] = v.x, sum[2 * t + 1] = v.y, sum[2 * t + 2] = v.z, sum[2 * t + 3] = v.w;
    }
  }

  // p0 + p1 to the second CTA, once its inbox is free
  DEVICE void give(int pass, const float (&p0)[kAcc], const float (&p1)[kAcc]) const {
    if (kStash || pass > 0) barrier_wait_cluster(drained, (pass - (kStash ? 0 : 1)) & 1);
    const uint32_t bar = peer_address(handed, first + 1);
#pragma unroll
    for (int t = 0; t < kItems; t += 2) {
      const int i = 2 * t;
      push(peer_address(inbox + place(t), first + 1), p0[i] + p1[i], p0[i + 1] + p1[i + 1], p0[i + 2] + p1[i + 2],
           p0[i + 3] + p1[i + 3], bar);
    }
  }
  DEVICE void inbox_is_free() const {
    named_barrier(warp / 4 + 1, 128);
    if (threadIdx.x % 128 == 0) barrier_arrive_peer(peer_address(drained, first));
  }
  DEVICE void take(const Tile& tile, int pass, const float (&p2)[kAcc], const float (&p3)[kAcc]) const {
    if (kStash) inbox_is_free();  // p2 was fetched, and the sums of the pass before long ago
    barrier_wait_cluster(handed, pass & 1);
    if (threadIdx.x == 0 && pass + 1 < a.passes) barrier_expect(handed, kHanded);
#pragma unroll
    for (int t = 0; t < kItems; t += 2) {
      const float4 v = *box(t);
      const int i = 2 * t;
      this->store(tile, t, (v.x + p2[i]) + p3[i], (v.y + p2[i + 1]) + p3[i + 1]);
      this->store(tile, t + 1, (v.z + p2[i + 2]) + p3[i + 2], (v.w + p2[i + 3]) + p3[i + 3]);
    }
    if (!kStash && pass + 1 < a.passes) inbox_is_free();
  }

  DEVICE void consume() {
    int slot = 0, done = 0;
    uint32_t phase = 0;
    load_scales();
    cluster_wait();  // peers run and their barriers exist
    for (int pass = 0; pass < a.passes; pass++) {
      const Tile tile = this->tile_of(pass);
      const int split = (2 * rank + 1) * a.part / 2 - rank * a.part, block0 = tile.row0 / kScaleBlock;
      const float* of_pass = scales + pass * kScaleRows * a.part;
      const float* upper = of_pass + ((tile.row0 + this->first_row(0)) / kScaleBlock - block0) * a.part;
      const float* lower = of_pass + ((tile.row0 + this->first_row(1)) / kScaleBlock - block0) * a.part;
      float total[kAcc], before[kAcc];
#pragma unroll 1
      for (int part = 0; part < 2; part++) {
        const int from = part ? split : 0, to = part ? a.part : split;
        sum_part(to - from, tile, upper + from, lower + from, slot, phase, done, total);
        if (part) break;
        if constexpr (kStash) {
          keep(total);
        } else {
#pragma unroll
          for (int i = 0; i < kAcc; i++) before[i] = total[i];
        }
      }
      if constexpr (kStash) fetch(before);
      rank == 0 ? give(pass, before, total) : take(tile, pass, before, total);
    }
  }

  DEVICE void run() {
    if (threadIdx.x == WGS * 128) {
      barrier_init(handed, 1);
      barrier_expect(handed, kHanded);
    }
    this->set_up();
    if (warp < WGS * 4) {
      if constexpr (kLend) take_registers<kOwnRegisters>();
      consume();
    } else {
      if constexpr (kLend) give_registers<kLeft>();
      const int role = warp - WGS * 4;
      if (XR > 1 && role == 1) cluster_wait();  // before the first multicast: the peers' barriers exist
      if (lane == 0 && role == 0) this->produce_weights();
      if (lane == 0 && role == 1) this->produce_x();
      __syncwarp();
      if (XR == 1 || role != 1) cluster_wait();
    }
  }
};

template <int XR, int T, int WGS, int KB>
__global__ void __launch_bounds__(Coded<XR, T, WGS, KB>::kThreads, 1)
coded_kernel(const __grid_constant__ Maps maps, const __grid_constant__ CodedArgs args) {
#ifdef ANABRANCH_EMULATE
  char* const smem = &smem_base<char>();
#else
  extern __shared__ __align__(1024) char smem[];
#endif
  Coded<XR, T, WGS, KB>(args, maps, smem).run();
}
