// Absorbed latent attention of a decode step: equal shares of the line of all requests' cache pages, see balanced.py.
//
// One warp copies cache rows ahead, row by row, so that rows lie 16 bytes off one another's banks; eight multiply. For
// the scores they split the 576 columns (WAYS) and the rows: each holds its part of the queries in registers and reads
// each row once. Parts are summed through shared memory by the threads that take the softmax. For the mixture each warp
// has 64 of the 512 columns, and reads each row once again. A tile is a page; STAGES of them are in shared memory.
#pragma once
#include "line.cuh"

constexpr int WARPS = 8, MATH = 32 * WARPS, THREADS = MATH + 128;  // three warps are idle and lend their registers
constexpr int STAGES = 2, WAYS = 4, TALL = PAGE * WAYS / WARPS;    // TALL rows of a warp
constexpr int STEPS = WIDTH / 16 / WAYS;                           // of 16 columns
constexpr int ROW_PITCH = PAGE + 8;                                // of a head's scores: heads meet in no bank
static_assert(STEPS * 16 * WAYS == WIDTH && TALL % 16 == 0);

// Strides are in elements and 64-bit. B requests, H heads; a piece is a request's tiles in one program's share.
struct AttendParams {
  const uint16_t* absorbed;  // [B, H, RANK] bf16, dense
  const uint16_t* q;         // [B, H, nope + ROPE] bf16; the last ROPE are read
  const uint16_t* pages;     // [pages, PAGE, WIDTH] bf16
  const int64_t* table;      // [B, max pages]
  const int64_t* totals;     // [B]
  float* acc;                // [programs + B, H, RANK]: unnormed mixtures
  float* stats;              // [programs + B, H, 2]: largest score, sum of weights
  int64_t q_token, q_head, table_stride, entry_stride, total_stride, page_pitch;
  int requests, heads, nope, least;
  float scale;  // of scores that are powers of two
  int early;    // 1: lengths, table and all rows but the newest are read before griddepcontrol.wait
};

// 16 * MT heads.
template <int MT>
struct AttendSmem {
  alignas(128) char rows[STAGES][PAGE * PITCH];
  union {
    alignas(16) char q[16 * MT * PITCH];  // until it is in registers
    float part[WAYS][16 * MT][ROW_PITCH];  // of scores
  };
  alignas(16) uint16_t p[16 * MT][ROW_PITCH];
  float keep[16 * MT];
  uint64_t full[STAGES], empty[STAGES], q_full;
};
static_assert(sizeof(AttendSmem<2>) <= 232448);

template <int MT>
struct Attend {
  using Smem = AttendSmem<MT>;
  static constexpr int HEADS = 16 * MT, LANES = MATH / HEADS, EACH = PAGE / LANES;  // LANES threads share a softmax
  static_assert(EACH % 4 == 0);

  const AttendParams& p;
  Smem& s;
  const Line line;
  int tid, lane, warp, first_head, heads, at, stop;

  DEV Attend(const AttendParams& p, Smem& s)
      : p(p), s(s), line{p.totals, p.total_stride, p.requests, (int)threadIdx.x % 32} {
    tid = threadIdx.x, lane = tid % 32, warp = shuffle(tid / 32, 0);
    first_head = blockIdx.y * HEADS, heads = p.heads - first_head < HEADS ? p.heads - first_head : HEADS;
  }

  // --- the warp that copies ---
  DEV int64_t page_of(const Line::Request& r, int tile) const {
    return p.table[r.b * p.table_stride + (int64_t)(tile - r.begin) * p.entry_stride];
  }
  DEV void copy_rows() {
    bool waited = !p.early;
    Line::Request r = line.locate(at);
    int64_t page = page_of(r, at);
    for (int tile = at, n = 0; tile < stop; tile++, n++) {
      Line::Request next = r;
      int64_t next_page = 0;
      if (tile + 1 < stop) {
        if (tile + 1 == r.end) next = line.after(r);
        next_page = page_of(next, tile + 1);
      }
      const int stage = n % STAGES, left = r.total - (tile - r.begin) * PAGE, count = left < PAGE ? left : PAGE;
      if (n >= STAGES) barrier_wait(shared_address(&s.empty[stage]), (n / STAGES - 1) & 1);
      if (!waited && tile + 1 == r.end) wait_for_previous(), waited = true;  // the newest row is from the kernel before
      const uint32_t bar = shared_address(&s.full[stage]), to = shared_address(s.rows[stage]);
      const uint16_t* from = p.pages + page * p.page_pitch;
      if (lane == 0) barrier_expect(bar, count * ROW_BYTES);
      __syncwarp();
      for (int i = lane; i < count; i += 32) copy_bulk(to + i * PITCH, from + i * WIDTH, ROW_BYTES, bar);
      r = next, page = next_page;
    }
    if (!waited) wait_for_previous();
  }

  // --- the warps that multiply ---
  uint32_t query[STEPS][MT][4];
  float mix[MT][8][4];
  float top, norm;

  DEV int depth() const { return warp % WAYS; }  // columns of a warp: steps depth, depth + WAYS ..

  DEV void load_query(int b, uint32_t parity) {
    fence_async_proxy();
    named_barrier(1, MATH);
    const uint32_t bar = shared_address(&s.q_full), to = shared_address(s.q);
    if (warp == 0) {
      if (lane == 0) barrier_expect(bar, heads * ROW_BYTES);
      __syncwarp();
      if (lane < heads) {
        const int h = first_head + lane;
        copy_bulk(to + lane * PITCH, p.absorbed + ((int64_t)b * p.heads + h) * RANK, RANK * 2, bar);
        copy_bulk(to + lane * PITCH + RANK * 2, p.q + b * p.q_token + h * p.q_head + p.nope, ROPE * 2, bar);
      }
    }
    barrier_wait(bar, parity);
#pragma unroll
    for (int step = 0; step < STEPS; step++)
#pragma unroll
      for (int m = 0; m < MT; m++)
        load_matrices(query[step][m],
                      to + (m * 16 + lane % 16) * PITCH + (depth() + step * WAYS) * 32 + lane / 16 * 16);
    named_barrier(1, MATH);  // parts of scores take the place
  }

  // A tile's rows that do not exist may hold anything, and zero times NaN is NaN.
  DEV void clear(int stage, int count) {
    for (int i = tid; i < (PAGE - count) * (RANK / 8); i += MATH)
      *reinterpret_cast<uint4*>(s.rows[stage] + (count + i / (RANK / 8)) * PITCH + i % (RANK / 8) * 16) =
          make_uint4(0, 0, 0, 0);
    fence_async_proxy();
  }

  DEV void score(int stage) {
    float sum[TALL / 8][MT][4] = {};
    const int first = warp / WAYS * TALL;
    const uint32_t rows = shared_address(s.rows[stage]);
    const uint32_t from = rows + (first + lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16;
#pragma unroll
    for (int step = 0; step < STEPS; step++)
#pragma unroll
      for (int pair = 0; pair < TALL / 16; pair++) {
        uint32_t b[4];
        load_matrices(b, from + pair * 16 * PITCH + (depth() + step * WAYS) * 32);
#pragma unroll
        for (int m = 0; m < MT; m++)
          mma_bf16(sum[2 * pair][m], query[step][m], b[0], b[1]),
              mma_bf16(sum[2 * pair + 1][m], query[step][m], b[2], b[3]);
      }
#pragma unroll
    for (int n = 0; n < TALL / 8; n++)
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          *reinterpret_cast<float2*>(&s.part[depth()][m * 16 + half * 8 + lane / 4][first + n * 8 + lane % 4 * 2]) =
              make_float2(sum[n][m][2 * half], sum[n][m][2 * half + 1]);
  }

  DEV void soften(int row, int total) {
    const int h = tid / LANES, l = tid % LANES;
    float x[EACH] = {};
#pragma unroll
    for (int k = 0; k < WAYS; k++)
#pragma unroll
      for (int i = 0; i < EACH; i += 4) {
        const float4 v = *reinterpret_cast<const float4*>(&s.part[k][h][i * LANES + l * 4]);
        x[i] += v.x, x[i + 1] += v.y, x[i + 2] += v.z, x[i + 3] += v.w;
      }
    float best = top;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int at = row + i / 4 * 4 * LANES + l * 4 + i % 4;
      x[i] = at < total ? x[i] * p.scale : -INFINITY;
      best = fmaxf(best, x[i]);
    }
#pragma unroll
    for (int m = 1; m < LANES; m *= 2) best = fmaxf(best, shuffle(best, lane ^ m));
    const float keep = exp2_fast(top - best);
    if (l == 0) s.keep[h] = keep;
    norm *= keep, top = best;
#pragma unroll
    for (int i = 0; i < EACH; i++) x[i] = exp2_fast(x[i] - best), norm += x[i];
#pragma unroll
    for (int i = 0; i < EACH; i += 2)
      *reinterpret_cast<uint32_t*>(&s.p[h][i / 4 * 4 * LANES + l * 4 + i % 4]) = pack_bf16(x[i], x[i + 1]);
  }

  DEV void blend(int stage) {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float keep = s.keep[m * 16 + half * 8 + lane / 4];
#pragma unroll
        for (int n = 0; n < 8; n++) mix[m][n][2 * half] *= keep, mix[m][n][2 * half + 1] *= keep;
      }
    const uint32_t weights = shared_address(s.p) + lane % 16 * ROW_PITCH * 2 + lane / 16 * 16;
    const uint32_t from = shared_address(s.rows[stage]) + lane % 16 * PITCH + warp * 128 + lane / 16 * 16;
#pragma unroll
    for (int k = 0; k < PAGE / 16; k++) {
      uint32_t a[MT][4];
#pragma unroll
      for (int m = 0; m < MT; m++) load_matrices(a[m], weights + (m * 16 * ROW_PITCH + k * 16) * 2);
#pragma unroll
      for (int pair = 0; pair < 4; pair++) {
        uint32_t b[4];
        load_matrices<4, true>(b, from + k * 16 * PITCH + pair * 32);
#pragma unroll
        for (int m = 0; m < MT; m++)
          mma_bf16(mix[m][2 * pair], a[m], b[0], b[1]), mma_bf16(mix[m][2 * pair + 1], a[m], b[2], b[3]);
      }
    }
  }

  DEV void store(int b) {
    const int64_t piece = ((int64_t)b + blockIdx.x) * p.heads + first_head;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int h = m * 16 + half * 8 + lane / 4;
        float* to = p.acc + (piece + h) * RANK + warp * 64 + lane % 4 * 2;
        if (h < heads)
#pragma unroll
          for (int n = 0; n < 8; n++)
            *reinterpret_cast<float2*>(to + n * 8) = make_float2(mix[m][n][2 * half], mix[m][n][2 * half + 1]);
      }
#pragma unroll
    for (int m = 1; m < LANES; m *= 2) norm += shuffle(norm, lane ^ m);
    const int h = tid / LANES;
    if (tid % LANES == 0 && h < heads)
      *reinterpret_cast<float2*>(p.stats + (piece + h) * 2) = make_float2(top, norm);
  }

  DEV void multiply() {
    wait_for_previous();
    if (at >= stop) return;
    Line::Request r = line.locate(at);
    uint32_t parity = 0;
    for (int tile = at, n = 0; tile < stop; parity ^= 1) {
      load_query(r.b, parity);
      top = -INFINITY, norm = 0.f;
#pragma unroll
      for (int i = 0; i < MT * 32; i++) mix[i / 32][i / 4 % 8][i % 4] = 0.f;
      const int until = r.end < stop ? r.end : stop;
      for (; tile < until; tile++, n++) {
        const int stage = n % STAGES, row = (tile - r.begin) * PAGE;
        barrier_wait(shared_address(&s.full[stage]), n / STAGES & 1);
        if (r.total - row < PAGE) clear(stage, r.total - row);
        score(stage);
        named_barrier(1, MATH);
        soften(row, r.total);
        named_barrier(1, MATH);
        blend(stage);
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&s.empty[stage]));
      }
      store(r.b);
      if (tile < stop) r = line.after(r);
    }
  }

  DEV void run() {
    launch_dependents();
    if (tid == 0) {
#pragma unroll
      for (int i = 0; i < STAGES; i++)
        barrier_init(shared_address(&s.full[i]), 1), barrier_init(shared_address(&s.empty[i]), WARPS);
      barrier_init(shared_address(&s.q_full), 1);
      barrier_init_done();
    }
    if (!p.early) wait_for_previous();
    const int tiles = line.tiles(), each = Line::share(tiles, gridDim.x, p.least);
    at = blockIdx.x * each, stop = at + each < tiles ? at + each : tiles;
    __syncthreads();
    if (warp >= WARPS) {
      give_registers<40>();
      if (warp == WARPS && at < stop) copy_rows();
      else wait_for_previous();
    } else {
      take_registers<232>();
      multiply();
    }
  }
};

template <int MT>
__global__ void __launch_bounds__(THREADS, 1) mla_attend_kernel(const __grid_constant__ AttendParams p) {
  Attend<MT>(p, smem_base<AttendSmem<MT>>()).run();
}
