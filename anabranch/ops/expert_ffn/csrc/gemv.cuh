// What both launches of one token's experts share. A warp owns a weight row and reads it from memory into registers, all
// at once, and asks for the next before it sums up this one: no ring in shared memory, no barrier, no sum across warps.
// An element's order of addition depends on its row length alone.
#pragma once
#ifdef ANABRANCH_EMULATE
#include "matrix.h"
#else
#include "gemv_ptx.cuh"
#endif

constexpr int CHUNK = 256;  // columns that a warp reads at once, 16 bytes a lane
constexpr int LINE = 64;    // columns of a cache line

struct Routing {
  const int64_t* experts;  // [top_k], global
  int top_k, first, count;
};

DEV int lane_id() { return threadIdx.x % 32; }

// Of the lane's choice: which local expert, -1 if none.
DEV int local_choice(const Routing& r) {
  if (lane_id() >= r.top_k) return -1;
  const int64_t local = load_early(r.experts + lane_id()) - r.first;
  return local >= 0 && local < r.count ? (int)local : -1;
}

// A lane's columns of N chunks of a row: 8 from `at` on in each, where any are left.
struct Part {
  const uint16_t* at = nullptr;
  int left = 0;
  DEV uint4 ask(int chunk) const { return stream(at + chunk * CHUNK, chunk * CHUNK < left); }
};

DEV float dot(float sum, const uint4& w, const uint4& x) {
  const uint32_t a[4] = {w.x, w.y, w.z, w.w}, b[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sum = fmaf(__uint_as_float(a[i] << 16), __uint_as_float(b[i] << 16), sum);
    sum = fmaf(__uint_as_float(a[i] & 0xffff0000u), __uint_as_float(b[i] & 0xffff0000u), sum);
  }
  return sum;
}

DEV float warp_sum(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}
