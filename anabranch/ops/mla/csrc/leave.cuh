// Merges the pieces of each request; for few requests also multiplies by value weights in that launch (balanced.py).
//
// Each warp finds the request's pieces and their weights by itself, in its lanes, and sums its columns over them, many
// loads at a time. For few requests eight warps share a head: two of the 512 columns a thread, then 32 columns of the
// product, whose weights were copied to shared memory before the wait: they cost neither time behind attention nor
// registers that it needs. For many requests a warp has 128 columns of a head and needs no other.
#pragma once
#include "line.cuh"

constexpr int COLUMNS = 32, LEAVE_WARPS = RANK / 64, LEAVE_THREADS = 32 * LEAVE_WARPS;
constexpr int QUARTERS = RANK / 128, MERGE_HEADS = LEAVE_WARPS / QUARTERS;
constexpr int WEIGHT_PITCH = RANK * 2 + 16;

struct LeaveParams {
  const float* acc;       // [programs + B, H, RANK]
  const float* stats;     // [programs + B, H, 2]
  const int64_t* totals;  // [B]
  const uint16_t* weight; // [H, V, RANK] bf16, rows dense; not read where mixtures are only merged
  const uint16_t* gate;   // [B, H, V] bf16 logits of a sigmoid, heads dense, or null; ready before a plain launch
  uint16_t* y;            // [B, H, V] bf16; the mixtures [B, H, RANK] where they are only merged
  int64_t total_stride, w_head, gate_token;
  int requests, heads, width, programs, least;
  int early;  // 1: lengths are read before griddepcontrol.wait
};

struct LeaveSmem {
  alignas(128) char weight[COLUMNS * WEIGHT_PITCH];
  alignas(16) uint16_t mixed[RANK];
  uint64_t landed;
};

DEV float warp_max(float x, int lane) {
#pragma unroll
  for (int m = 16; m; m /= 2) x = fmaxf(x, shuffle(x, lane ^ m));
  return x;
}
DEV float warp_sum(float x, int lane) {
#pragma unroll
  for (int m = 16; m; m /= 2) x += shuffle(x, lane ^ m);
  return x;
}
DEV float dot8(uint4 a, uint4 b, float sum) {
  const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sum = fmaf(bf16_low(x[i]), bf16_low(y[i]), sum);
    sum = fmaf(bf16_high(x[i]), bf16_high(y[i]), sum);
  }
  return sum;
}

DEV void add(float2& sum, float weight, float2 x) {
  sum.x = fmaf(weight, x.x, sum.x), sum.y = fmaf(weight, x.y, sum.y);
}
DEV void add(float4& sum, float weight, float4 x) {
  sum.x = fmaf(weight, x.x, sum.x), sum.y = fmaf(weight, x.y, sum.y);
  sum.z = fmaf(weight, x.z, sum.z), sum.w = fmaf(weight, x.w, sum.w);
}

struct Pieces { int first, count; };
DEV Pieces pieces_of(const LeaveParams& p, const Line& line, int b) {
  const int each = Line::share(line.tiles(), p.programs, p.least), begin = line.before(b);
  const int own = line.tiles_of(line.total_of(b)), first = begin / each;
  return {first, own ? (begin + own - 1) / each - first + 1 : 0};
}

// Columns of head h's mixture for request b, `column` in units of Vector; BATCH pieces' loads are under way at a time.
template <int BATCH, class Vector>
DEV float merge(const LeaveParams& p, Pieces pieces, int b, int h, int column, int lane, Vector& mix) {
  constexpr int WIDE = RANK * 4 / sizeof(Vector);
  const int64_t row = (int64_t)(pieces.first + b) * p.heads + h, step = p.heads;
  const float2* stats = reinterpret_cast<const float2*>(p.stats) + row;
  const Vector* acc = reinterpret_cast<const Vector*>(p.acc) + row * WIDE + column;
  float top = -INFINITY, norm = 0.f;
  for (int i = lane; i < pieces.count; i += 32) top = fmaxf(top, stats[i * step].x);
  top = warp_max(top, lane);
  for (int base = 0; base < pieces.count; base += 32) {
    float raised = 0.f;
    if (base + lane < pieces.count) {
      const float2 own = stats[(base + lane) * step];
      raised = exp2_fast(own.x - top), norm += raised * own.y;
    }
#pragma unroll 1
    for (int at = base; at < base + 32 && at < pieces.count; at += BATCH) {
      Vector part[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; i++) part[i] = at + i < pieces.count ? acc[(at + i) * step * WIDE] : Vector{};
#pragma unroll
      for (int i = 0; i < BATCH; i++) add(mix, shuffle(raised, at - base + i), part[i]);  // by 0 past the last
    }
  }
  norm = warp_sum(norm, lane);
  return pieces.count ? 1.f / norm : 0.f;
}

struct Leave {
  const LeaveParams& p;
  LeaveSmem& s;
  const Line line;
  const int tid, lane, warp, h, b;

  DEV Leave(const LeaveParams& p, LeaveSmem& s)
      : p(p), s(s), line{p.totals, p.total_stride, p.requests, (int)threadIdx.x % 32}, tid(threadIdx.x),
        lane(tid % 32), warp(shuffle(tid / 32, 0)), h(blockIdx.y), b(blockIdx.z) {}

  DEV void copy_weights() {
    const uint32_t bar = shared_address(&s.landed);
    const int first = blockIdx.x * COLUMNS, columns = p.width - first < COLUMNS ? p.width - first : COLUMNS;
    if (lane == 0) barrier_init(bar, 1), barrier_init_done(), barrier_expect(bar, columns * RANK * 2);
    __syncwarp();
    if (lane < columns)
      copy_bulk(shared_address(s.weight) + lane * WEIGHT_PITCH,
                p.weight + h * p.w_head + (int64_t)(first + lane) * RANK, RANK * 2, bar);
  }

  static constexpr int OWN = COLUMNS / LEAVE_WARPS;  // columns of a warp; a lane each has the end of it

  DEV int own_column() const { return blockIdx.x * COLUMNS + warp * OWN + lane; }
  DEV bool owns() const { return lane < OWN && own_column() < p.width; }

  // As ops/gate rounds.
  DEV float strength() const {
    const float logit = bf16_low(p.gate[b * p.gate_token + h * p.width + own_column()]);
    return round_bf16(__frcp_rn(__fadd_rn(1.f, expf(-logit))));
  }

  DEV void multiply(float strength) const {
    const uint4* mixed = reinterpret_cast<const uint4*>(s.mixed);
    const uint4 low = mixed[lane], high = mixed[lane + 32];
    float own = 0.f;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const uint4* w = reinterpret_cast<const uint4*>(s.weight + (warp * OWN + i) * WEIGHT_PITCH);
      const float sum = warp_sum(dot8(high, w[lane + 32], dot8(low, w[lane], 0.f)), lane);
      if (lane == i) own = sum;
    }
    if (owns())
      p.y[((int64_t)b * p.heads + h) * p.width + own_column()] = (uint16_t)pack_bf16(round_bf16(own) * strength, 0.f);
  }

  DEV void run() {
    launch_dependents();
    if (warp == 0) copy_weights();
    const float by = p.gate && owns() ? strength() : 1.f;
    if (!p.early) wait_for_previous();
    const Pieces pieces = pieces_of(p, line, b);
    if (p.early) wait_for_previous();
    float2 mix = make_float2(0.f, 0.f);
    const float share = merge<16>(p, pieces, b, h, tid, lane, mix);
    *reinterpret_cast<uint32_t*>(&s.mixed[2 * tid]) = pack_bf16(mix.x * share, mix.y * share);
    __syncthreads();
    barrier_wait(shared_address(&s.landed), 0);
    multiply(by);
  }
};

__global__ void __launch_bounds__(LEAVE_THREADS, 4) mla_leave_kernel(const __grid_constant__ LeaveParams p) {
  Leave(p, smem_base<LeaveSmem>()).run();
}

__global__ void __launch_bounds__(LEAVE_THREADS, 5) mla_merge_kernel(const __grid_constant__ LeaveParams p) {
  launch_dependents();
  if (!p.early) wait_for_previous();
  const int lane = threadIdx.x % 32, warp = shuffle((int)threadIdx.x / 32, 0), b = blockIdx.y;
  const int h = blockIdx.x * MERGE_HEADS + warp / QUARTERS, column = warp % QUARTERS * 32 + lane;
  const Pieces pieces = pieces_of(p, Line{p.totals, p.total_stride, p.requests, lane}, b);
  if (p.early) wait_for_previous();
  if (h >= p.heads) return;
  float4 mix = make_float4(0.f, 0.f, 0.f, 0.f);
  const float share = merge<8>(p, pieces, b, h, column, lane, mix);
  reinterpret_cast<uint2*>(p.y)[((int64_t)b * p.heads + h) * (RANK / 4) + column] =
      make_uint2(pack_bf16(mix.x * share, mix.y * share), pack_bf16(mix.z * share, mix.w * share));
}
