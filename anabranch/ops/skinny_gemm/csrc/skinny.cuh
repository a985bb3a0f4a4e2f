// y[M, N] = x[M, K] W[N, K]^T in bf16 for few tokens: the weights stream once through a TMA ring at memory speed.
//
// Weights are the A operand of wgmma (64 rows), tokens the N side. A group of C CTAs owns one tile of weight rows at a
// time and splits K in C; each CTA sums kSegments / C fixed segments of K, and the segment sums meet in one fixed binary
// tree, first in registers, then through the shared memory of the group. So the bits of an output element depend on its
// row of x, its row of W and K alone: not on M, N, C, the tile, the ring or the timing.
// A cluster is XR such groups with different rows; they share each tile of x by multicast.
// Warps: WGS consumer warpgroups (64 rows each), a weight producer that never waits for the previous kernel, an x
// producer that does, and with LOW the warps of the second, low-rank product (y2 = y[:, low_row0 ..] W2^T), which
// start as soon as the tiles that hold its input are published.
#pragma once
#ifndef ANABRANCH_EMULATE
#include "low_rank.cuh"
#include "ptx.cuh"
#include "wgmma.cuh"
#endif

constexpr int kMaxStages = 32, kHeader = 1024, kSegments = 4;

struct Args {
  __nv_bfloat16* y;
  int M, N, ldy;
  int clusters, passes;  // a group of CTAs does `passes` tiles in a row
  int rows;              // of the tallest tile; rows go out in groups of 8, so tiles differ by at most 8
  int part;              // 64-element blocks of K per CTA
  int ring;              // bytes of shared memory for weights and x
  int trigger;           // the next kernel may start once all but this many stages are requested
  int ahead;             // weight stages prefetched into L2 beyond the ring, once
  // low-rank product: the first tile of clusters [0, low_tiles) holds the rows from low_row0, which are N - low_row0
  int low_tiles, low_tile_rows, low_row0, low_ahead;
  int n2, n2_group;         // rows of w2 in all, and of each of its sides: side i reads the i-th 128 columns
  const __nv_bfloat16* w2;  // [n2, 128]
  __nv_bfloat16* y2;        // [sides, M, n2_group]
  unsigned* sync;           // {warpgroups that published, CTAs past the wait}: zero on entry and on exit
};

struct Maps {
  CUtensorMap x, tall, low, tail_tall, tail_low;
};

struct Tile {
  int row0, rows;
};

// XB: blocks of x beside a block of weights, 2 where weights have one byte (fp8_linear/csrc/coded.cuh); their rows are
// dealt to the warps eight at a time, for each row costs its warp work.
template <int C, int XR, int T, int WGS, int KB, bool LOW, int XB = 1>
struct Skinny {
  static constexpr int kSegs = kSegments / C, kAcc = T / 2, kItems = T / 4, kOwn = kItems / C;
  static constexpr int kLevels = kSegs == 1 ? 1 : kSegs == 2 ? 2 : 3;  // partial sums kept by the tree
  static constexpr int kWide = kOwn % 2 == 0 ? 2 : 1;                  // items a push carries
  static constexpr int kLowWarps = T < 32 ? 4 : T / 8, kThreads = WGS * 128 + 64 + (LOW ? kLowWarps * 32 : 0);
  static constexpr bool kCluster = C * XR > 1;
  static constexpr uint32_t kPushed = (C - 1) * kOwn * WGS * 128 * 8;
  static_assert(kItems % C == 0, "every CTA of a group owns whole items (8 rows x 8 tokens a warp)");

  const Args& a;
  const Maps& maps;
  char* smem;
  int warp, lane, crank, rank, first, cluster, group, stages;
  uint32_t full, empty, x_empty, received, drained, ring, x_ring, inbox, w_stage;
  bool tail;
  static constexpr uint32_t kXStage = KB * XB * T * 128;

  DEVICE Skinny(const Args& args, const Maps& m, char* s) : a(args), maps(m), smem(s) {
    const uint32_t base = shared_address(s);
    full = base, empty = base + 8 * kMaxStages, x_empty = base + 16 * kMaxStages;
    received = base + 24 * kMaxStages, drained = received + 8;
    warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    crank = kCluster ? cluster_rank() : 0, rank = crank % C, first = crank - rank;
    cluster = blockIdx.x / (C * XR), group = blockIdx.x / C;
    tail = LOW && cluster < a.low_tiles;
    ring = base + kHeader, inbox = ring + a.ring;
    // a CTA that does nothing but a tail tile has smaller stages, so more of them in flight
    w_stage = KB * (tail && a.passes == 1 ? a.low_tile_rows : a.rows) * 128;
    stages = min(kMaxStages, (int)(a.ring / (w_stage + kXStage)));
    x_ring = ring + stages * w_stage;
  }

  DEVICE int tile_stages() const { return a.part / KB; }
  DEVICE int all_stages() const { return a.passes * tile_stages(); }

  // `groups` groups of 8 rows from row `row0`, dealt to `tiles` tiles; the index-th of them
  static DEVICE Tile deal(int row0, unsigned groups, unsigned tiles, unsigned index) {
    const unsigned lo = index * groups / tiles, hi = (index + 1) * groups / tiles;
    return {row0 + (int)lo * 8, (int)(hi - lo) * 8};
  }
  DEVICE Tile tile_of(int pass) const {
    if (!LOW) return deal(0, a.N / 8, a.clusters * XR * a.passes, group * a.passes + pass);
    if (tail && pass == 0) return deal(a.low_row0, (a.N - a.low_row0) / 8, a.low_tiles, cluster);
    const int index = cluster * a.passes + pass - min(a.low_tiles, cluster + 1);
    return deal(0, a.low_row0 / 8, a.clusters * a.passes - a.low_tiles, index);
  }
  DEVICE const CUtensorMap* map_of(const Tile& t) const {
    if (LOW && t.row0 >= a.low_row0) return t.rows == a.low_tile_rows ? &maps.tail_tall : &maps.tail_low;
    return t.rows == a.rows ? &maps.tall : &maps.low;
  }

  // The stages of all passes in order: first K block, stages left in this tile, tile.
  struct Cursor {
    int k, left, pass;
    Tile tile;
  };
  DEVICE Cursor start() const { return {rank * a.part, tile_stages(), 0, tile_of(0)}; }
  DEVICE void next(Cursor& c) const {
    c.k += KB;
    if (--c.left == 0 && ++c.pass < a.passes) {
      c.k = rank * a.part;
      c.left = tile_stages();
      c.tile = tile_of(c.pass);
    }
  }
  DEVICE void advance(int& slot, uint32_t& phase) const {
    if (++slot == stages) slot = 0, phase ^= 1;
  }

  DEVICE void set_up() {
    if (threadIdx.x == WGS * 128) {
      tma_prefetch_map(&maps.tall);
      tma_prefetch_map(&maps.low);
      tma_prefetch_map(&maps.x);
      for (int i = 0; i < stages; i++) {
        barrier_init(full + 8 * i, 2);
        barrier_init(empty + 8 * i, WGS * 4);
        barrier_init(x_empty + 8 * i, WGS * 4 * XR);
      }
      barrier_init(received, 1);
      barrier_init(drained, C > 1 ? (C - 1) * WGS : 1);
      barrier_init_done();
      if (C > 1) barrier_expect(received, kPushed);
    }
    __syncthreads();
    if (kCluster) cluster_arrive_relaxed();
  }

  DEVICE void produce_weights() {
    const int total = all_stages(), filled = min(stages, total);
    Cursor c = start();
    int slot = 0;
    uint32_t phase = 1;
    for (int i = 0; i < total; i++) {
      barrier_wait(empty + 8 * slot, phase);
      barrier_expect(full + 8 * slot, KB * c.tile.rows * 128);
      tma_load(ring + slot * w_stage, map_of(c.tile), c.tile.row0, c.k, full + 8 * slot, kEvictFirst);
      next(c);
      advance(slot, phase);
      if (i + 1 == filled) {
        Cursor p = c;
        for (int j = 0; j < (tail ? a.low_ahead : a.ahead) && filled + j < total; j++, next(p))
          tma_prefetch_l2(map_of(p.tile), p.tile.row0, p.k);
      }
    }
  }

  // The next kernel is let in only after the previous one has ended: never more than two are in flight.
  DEVICE void produce_x() {
    wait_for_previous();
    const int total = all_stages(), last = max(total - a.trigger, 1);
    Cursor c = start();
    int slot = 0;
    uint32_t phase = 1;
    for (int i = 0; i < total; i++) {
      const uint32_t to = x_ring + slot * kXStage, bar = full + 8 * slot;
      barrier_wait((XR > 1 ? x_empty : empty) + 8 * slot, phase);
      barrier_expect(bar, kXStage);
      if (XR == 1) {
        tma_load(to, &maps.x, 0, c.k * XB, bar, kEvictLast);
      } else {
        const int token = first / C * (T / XR);  // my share of the tokens, to every group
        int peers = 0;
#pragma unroll
        for (int g = 0; g < XR; g++) peers |= 1 << (g * C);
        peers <<= rank;
        for (int b = 0; b < KB * XB; b++)
          tma_load_multicast(to + (b * T + token) * 128, &maps.x, token, c.k * XB + b, bar, peers, kEvictLast);
      }
      next(c);
      advance(slot, phase);
      if (i + 1 == last) launch_dependents();
    }
  }

  // The low-rank warps share this CTA's units of 16 rows of y2 and the groups of 8 tokens. Weights come in while x is
  // still computed: those of the first unit to registers, the others to L2, as loads behind the weight stream are slow.
  DEVICE void low_rank(int part) {
    const int all = a.n2 / kLowRows, each = all / (int)gridDim.x, more = all % (int)gridDim.x;
    const int mine = each + ((int)blockIdx.x < more), sharing = low_sharing(mine), tokens = (a.M + 7) / 8;
    if (part >= mine * sharing) return;  // a warp that has nothing to do would only slow the others down
    const int stride = low_busy(mine) / sharing;
    uint32_t w[8][4];
    bool ready = false;
    for (int u = part / sharing; u < mine; u += stride) {
      const int row0 = ((int)blockIdx.x + u * (int)gridDim.x) * kLowRows, side = row0 / a.n2_group;
      low_rank_weights(a.w2 + (int64_t)row0 * kRank, kLowRows, w);
      if (!ready) {
        for (int v = u + stride; v < mine; v += stride)
          prefetch_l2(a.w2 + ((int64_t)blockIdx.x + v * gridDim.x) * kLowRows * kRank + lane * 64);
        wait_for_tail();
        ready = true;
      }
      __nv_bfloat16* y = a.y2 + (int64_t)side * a.M * a.n2_group + row0 - side * a.n2_group;
      for (int t = part % sharing; t < tokens; t += sharing) {
        const __nv_bfloat16* x = a.y + (int64_t)min(t * 8 + lane / 4, a.M - 1) * a.ldy + a.low_row0 + side * kRank;
        float d[4];
        low_rank_tile(x, w, d);
        low_rank_store(y, t * 8, a.M, kLowRows, a.n2_group, d);
      }
    }
    // every warp that waited is counted; the last one leaves the words as it found them
    const int busy = more * low_busy(each + 1) + ((int)gridDim.x - more) * low_busy(each);
    if (lane == 0 && atomicAdd(a.sync + 1, 1) == busy - 1) a.sync[0] = 0, a.sync[1] = 0;
  }
  // warps that share a unit in a CTA with `mine` units, and warps that have work there
  DEVICE int low_sharing(int mine) const { return mine ? min(max(1, kLowWarps / mine), (a.M + 7) / 8) : 0; }
  DEVICE int low_busy(int mine) const { return min(kLowWarps, mine * low_sharing(mine)); }
  DEVICE void wait_for_tail() const {
    wait_for_previous();
    const unsigned want = a.low_tiles * C * WGS;
    unsigned published = 0;
    while (published < want)
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(published) : "l"(a.sync) : "memory");
  }

  // of the upper or lower eight rows of this warp's sixteen, in the tile
  DEVICE int first_row(int lower) const { return XB == 1 ? warp * 16 + lower * 8 : (lower * WGS * 4 + warp) * 8; }

  // Item `item` of this warp: 8 rows x 8 tokens. Transposed in registers, so that a lane stores two rows at once.
  DEVICE void store(const Tile& tile, int item, float v0, float v1) const {
    const uint32_t pair = transpose_8x8(pack_bf16(v0, v1));
    const int r = first_row(item & 1) + lane % 4 * 2, t = item / 2 * 8 + lane / 4;
    if (r < tile.rows && t < a.M) *reinterpret_cast<uint32_t*>(a.y + (long long)t * a.ldy + tile.row0 + r) = pair;
  }

  DEVICE void release(int slot, int& done) const {  // this warp no longer reads the slot
    if (lane == 0) barrier_arrive(empty + 8 * slot);
    if (XR > 1 && done + stages < all_stages() && lane < XR)
      barrier_arrive_peer_relaxed(peer_address(x_empty + 8 * slot, lane * C + rank));
    done++;
  }

  // Sums this CTA's part of K into `sums`, segment by segment; a stage is released one stage late.
  DEVICE void main_loop(const Tile& tile, int& slot, uint32_t& phase, int& done, float (&sums)[kLevels][kAcc]) const {
    const uint32_t pitch = tile.rows * 128, wg = warp / 4;
    const int seg_stages = tile_stages() / kSegs;
#pragma unroll
    for (int seg = 0; seg < kSegs; seg++) {
      float acc[kAcc];
#pragma unroll
      for (int i = 0; i < kAcc; i++) acc[i] = 0.f;
      int previous = 0;
      for (int i = 0; i < seg_stages; i++) {
        barrier_wait(full + 8 * slot, phase);
        wgmma_fence();
#pragma unroll
        for (int b = 0; b < KB; b++) {
          const uint64_t w = wgmma_operand(ring + slot * w_stage + b * pitch + wg * 8192);
          const uint64_t x = wgmma_operand(x_ring + slot * kXStage + b * T * 128);
#pragma unroll
          for (int k = 0; k < 4; k++) Wgmma<T>::mma(acc, w + 2 * k, x + 2 * k, i | b | k);
        }
        wgmma_commit();
        if (i > 0) {
          wgmma_wait<1>();
          release(previous, done);
        }
        previous = slot;
        advance(slot, phase);
      }
      wgmma_wait<0>();
      pin(acc);
      release(previous, done);
      int level = 0;
#pragma unroll
      for (int t = seg; t & 1; t >>= 1, level++)
#pragma unroll
        for (int i = 0; i < kAcc; i++) acc[i] = sums[level][i] + acc[i];
#pragma unroll
      for (int i = 0; i < kAcc; i++) sums[level][i] = acc[i];
    }
  }

  // Every CTA of the group keeps its own items and sends the others: no cluster barrier, bytes are counted on arrival.
  DEVICE void exchange(const Tile& tile, int pass, uint32_t box, const float (&sum)[kAcc]) const {
    const int tid = threadIdx.x;
    if (pass > 0) barrier_wait_cluster(drained, (pass - 1) & 1);       // peers have read the previous tile
#pragma unroll
    for (int it = 0; it < kItems; it += kWide)
      if (it / kOwn != rank) {
        const uint32_t to = peer_address(box + ((rank * kOwn + it % kOwn) * WGS * 128 + tid * kWide) * 8, first + it / kOwn);
        const uint32_t bar = peer_address(received, first + it / kOwn);
        if constexpr (kWide == 2) push(to, sum[2 * it], sum[2 * it + 1], sum[2 * it + 2], sum[2 * it + 3], bar);
        else push(to, sum[2 * it], sum[2 * it + 1], bar);
      }
    barrier_wait_cluster(received, pass & 1);
    if (tid == 0 && pass + 1 < a.passes) barrier_expect(received, kPushed);
    const float2* boxes = reinterpret_cast<const float2*>(smem + (box - shared_address(smem)));
#pragma unroll
    for (int q = 0; q < kOwn; q++) {
      float2 v[C];
#pragma unroll
      for (int r = 0; r < C; r++) {
        const int it = r * kOwn + q;
        v[r] = boxes[(it - q % kWide) * WGS * 128 + tid * kWide + q % kWide];
        if (r == rank) v[r] = make_float2(sum[2 * it], sum[2 * it + 1]);
      }
      // the item I own, from every CTA: `v[r]` is what CTA r summed for it
#pragma unroll
      for (int d = 1; d < C; d *= 2)
#pragma unroll
        for (int r = 0; r < C; r += 2 * d) v[r].x += v[r + d].x, v[r].y += v[r + d].y;
      store(tile, rank * kOwn + q, v[0].x, v[0].y);
    }
    if (pass + 1 < a.passes) {
      named_barrier(warp / 4 + 1, 128);
      if (tid % 128 == 0)
        for (int r = 0; r < C; r++)
          if (r != rank) barrier_arrive_peer(peer_address(drained, first + r));
    }
  }

  DEVICE void consume() {
    int slot = 0, done = 0;
    uint32_t phase = 0, box = inbox;
    if (kCluster) cluster_wait();  // peers run and their barriers exist
    for (int pass = 0; pass < a.passes; pass++) {
      const Tile tile = tile_of(pass);
      float sums[kLevels][kAcc];
      main_loop(tile, slot, phase, done, sums);
      float(&sum)[kAcc] = sums[kLevels - 1];
      asm volatile("" : "+r"(box));  // addresses are computed here, not kept in registers through the main loop
      if constexpr (C > 1) {
        exchange(tile, pass, box, sum);
      } else {
#pragma unroll
        for (int it = 0; it < kItems; it++) store(tile, it, sum[2 * it], sum[2 * it + 1]);
      }
      if (tail && pass == 0) {  // publish the input of the low-rank product
        named_barrier(warp / 4 + 1, 128);
        if (threadIdx.x % 128 == 0) {
          __threadfence();
          atomicAdd(a.sync, 1);
        }
      }
    }
  }

  DEVICE void run() {
    set_up();
    if (warp < WGS * 4) return consume();
    const int role = warp - WGS * 4;
    if (XR > 1 && role == 1) cluster_wait();  // before the first multicast: the peers' barriers exist
    if (LOW && role >= 2) low_rank(role - 2);
    else if (lane == 0) role == 0 ? produce_weights() : produce_x();
    __syncwarp();
    if (kCluster && (XR == 1 || role != 1)) cluster_wait();
  }
};

template <int C, int XR, int T, int WGS, int KB, bool LOW>
__global__ void __launch_bounds__(Skinny<C, XR, T, WGS, KB, LOW>::kThreads, 1)
skinny_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char smem[];
  Skinny<C, XR, T, WGS, KB, LOW>(args, maps, smem).run();
}
