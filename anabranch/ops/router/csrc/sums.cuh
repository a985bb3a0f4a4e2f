// Sums of a block in one order, whatever else it sums: a thread's columns, then lanes and warps by halving.
#pragma once
#ifdef ANABRANCH_EMULATE
#include "matrix.h"
#else
#include "router_ptx.cuh"
#endif

constexpr int WARPS = 8, THREADS = 32 * WARPS;

DEV int lane_id() { return threadIdx.x % 32; }
DEV int warp_id() { return threadIdx.x / 32; }

DEV float low(uint32_t pair) { return __uint_as_float(pair << 16); }
DEV float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

DEV uint4 add_pairs(const uint4& a, const uint4& b) {
  return make_uint4(add_pair(a.x, b.x), add_pair(a.y, b.y), add_pair(a.z, b.z), add_pair(a.w, b.w));
}

// In the order that Triton's compiler gives ops/norm: of the first piece the second column comes first.
template <bool FIRST>
DEV float add_squares(float sum, const uint4& v) {
  const uint32_t a[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const bool swap = FIRST && i == 0;
    const float one = swap ? high(a[i]) : low(a[i]), other = swap ? low(a[i]) : high(a[i]);
    sum = fmaf(other, other, fmaf(one, one, sum));
  }
  return sum;
}

DEV float dot(float sum, const uint4& w, const uint4& x) {
  const uint32_t a[4] = {w.x, w.y, w.z, w.w}, b[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; i++) sum = fmaf(high(a[i]), high(b[i]), fmaf(low(a[i]), low(b[i]), sum));
  return sum;
}

// v * scale, rounded, times the gain, rounded.
DEV uint4 scaled(const uint4& v, float scale, const uint4& gain) {
  const uint32_t a[4] = {v.x, v.y, v.z, v.w}, g[4] = {gain.x, gain.y, gain.z, gain.w};
  uint32_t d[4];
#pragma unroll
  for (int i = 0; i < 4; i++) d[i] = multiply_pair(pack_bf16(low(a[i]) * scale, high(a[i]) * scale), g[i]);
  return make_uint4(d[0], d[1], d[2], d[3]);
}

// Sums over the warp of HELD values, a power of two up to 32: lane l returns that of value l / (32 / HELD). Half of the
// values leave a lane at every step, and each has the order of addition of one alone.
template <int HELD, int MASK = 16, int COUNT>
DEV float warp_sums(float (&v)[COUNT]) {
  if constexpr (HELD > 1) {
    const bool upper = lane_id() & MASK;
#pragma unroll
    for (int i = 0; i < HELD / 2; i++) {
      const float a = v[i], b = v[i + HELD / 2];
      v[i] = (upper ? b : a) + __shfl_xor_sync(~0u, upper ? a : b, MASK);
    }
  } else {
    v[0] += __shfl_xor_sync(~0u, v[0], MASK);
  }
  if constexpr (MASK > 1) return warp_sums<(HELD > 1 ? HELD / 2 : 1), MASK / 2>(v);
  else return v[0];
}

// Every warp's sums, for the block to read behind a barrier.
template <int COUNT>
DEV void share(float (&v)[COUNT], float (*to)[WARPS]) {
  constexpr int LANES = 32 / COUNT;
  const float sum = warp_sums<COUNT>(v);
  if (lane_id() % LANES == 0) to[lane_id() / LANES][warp_id()] = sum;
}

DEV float sum_of_warps(const float (&part)[WARPS]) {
  const float4 a = *reinterpret_cast<const float4*>(part), b = *reinterpret_cast<const float4*>(part + 4);
  return ((a.x + b.x) + (a.z + b.z)) + ((a.y + b.y) + (a.w + b.w));
}
