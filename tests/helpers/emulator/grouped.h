// What the grouped products use beyond hopper.h: boxes of five dimensions, products of two shared operands, barriers
// of a warpgroup, sums that threads share.
#pragma once
#include "hopper.h"

#define launch_dependents griddep_launch  // aborts before the wait

struct Map { const char* data; int64_t size[5], pitch[4]; int box[5]; };
constexpr uint64_t kEvictNormal = 0;
inline void load_box(uint32_t to, const Map& map, int a, int b, int c, int d, int e, uint32_t bar, uint64_t) {
  if (to % 1024) refuse("a swizzled tile that is not on 1024 bytes");
  char* const base = shared_pointer(0);
  Counted* const counter = &counted(bar);
  const Map m = map;
  under_way.push_back([=] {
    const int64_t from[5] = {a, b, c, d, e};
    const int rows = m.box[1] * m.box[2] * m.box[3] * m.box[4];
    for (int r = 0; r < rows; r++)
      for (int piece = 0; piece < 8; piece++) {
        int64_t at = from[0] + piece * 8, offset = at * 2;
        bool inside = at < m.size[0];
        for (int n = 1, rest = r; n < 5; rest /= m.box[n++]) {
          at = from[n] + rest % m.box[n], inside &= at < m.size[n], offset += at * m.pitch[n - 1] * 2;
        }
        char* const target = base + swizzled(to + r * 128 + piece * 16);
        if (inside) memcpy(target, m.data + offset, 16);
        else memset(target, 0, 16);
      }
    land(counter, rows * 128);
  });
}

template <int N> struct Wgmma {
  static void mma(float (&d)[N / 2], uint64_t a, uint64_t b, int add) {
    float* const sum = d;
    my_products().groups.back().push_back([=] {
      const int lane = E.current % 32, row = E.current / 32 % 4 * 16 + lane / 4;
      float left[2][16];
      for (int k = 0; k < 32; k++) left[k / 16][k % 16] = right_operand(a, row + k / 16 * 8, k % 16, false);
      for (int n = lane % 4 * 2; n < N; n += n % 2 ? 7 : 1)
        for (int half = 0; half < 2; half++) {
          float& out = sum[n / 8 * 4 + half * 2 + n % 2];
          float x = add ? out : 0.f;
          for (int k = 0; k < 16; k++) x = fmaf(left[half][k], right_operand(b, n, k, false), x);
          out = x;
        }
    });
  }
};

struct Meeting { int arrived = 0; long generation = 0; };
inline Meeting meetings[16];
inline void named_barrier(int id, int threads) {
  Meeting& m = meetings[id];
  const long g = m.generation;
  if (++m.arrived == threads) m.arrived = 0, m.generation++;
  else while (m.generation == g) yield();
}

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.f / a; }

// --- lanes and clusters ---
inline int shuffle_xor(int x, int mask) { return shuffle(x, E.current % 32 ^ mask); }
inline int atomicAdd(int* at, int x) { return *at += x, *at - x; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline void cluster_arrive() { cluster_arrive_relaxed(); }
inline int load_peer(const int* local, int rank) { return *(const int*)remote((void*)local, rank); }
