// What the chunked prefill uses beyond emulate.h: matrix instructions of a warp, 16-bit pairs, asynchronous copies.
//
// An asynchronous copy arrives only when its thread waits for it. fp16 is rounded in software: old compilers lack it.
#pragma once
#include "emulate.h"

struct uint2 { uint32_t x, y; };
struct float2 { float x, y; };
inline uint2 make_uint2(uint32_t a, uint32_t b) { return {a, b}; }
inline float2 make_float2(float a, float b) { return {a, b}; }
inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
inline Index gridDim;

// --- what every lane of a warp says, as an array ---
struct Said { alignas(16) char bytes[2][32 * 32]; };
inline std::vector<Said> said;
template <class T> const T* everyone(const T& mine) {
  static_assert(sizeof(T) <= 32);
  if (said.size() < E.warps.size()) said.resize(E.warps.size());
  Warp& w = E.warps[E.current / 32];
  const long g = w.generation;
  auto* bytes = said[E.current / 32].bytes[g & 1];
  memcpy(bytes + E.current % 32 * sizeof(T), &mine, sizeof(T));
  if (++w.arrived == 32) w.arrived = 0, w.generation++;
  else while (w.generation == g) yield();
  return (const T*)said[E.current / 32].bytes[g & 1];
}
template <class T> T shuffle(T x, int lane) { return everyone(x)[lane & 31]; }
template <class T> T shuffle_up(T x, int by) {
  const int lane = E.current % 32;
  return everyone(x)[lane < by ? lane : lane - by];
}
inline uint32_t lanes_where(bool x) {
  const bool* all = everyone(x);
  uint32_t mask = 0;
  for (int i = 0; i < 32; i++) mask |= (uint32_t)all[i] << i;
  return mask;
}
inline int first_set(uint32_t x) { return __builtin_ctz(x); }

// --- shared memory by address ---
inline uint32_t shared_address(const void* p) { return (uint32_t)((const char*)p - shared_of(me().cta)); }
inline char* shared_pointer(uint32_t address) { return shared_of(me().cta) + address; }

struct Copy { uint32_t to; const void* from; int bytes; };
inline std::vector<std::vector<Copy>> copies;
inline void copy_async(uint32_t to, const void* from, int bytes) {
  if ((to | (uintptr_t)from) & 15) refuse("a copy that is not on 16 bytes");
  if (copies.size() < E.fibers.size()) copies.resize(E.fibers.size());
  copies[E.current].push_back({to, from, bytes});
}
inline void copies_done() {
  for (const Copy& c : copies[E.current]) {
    memset(shared_pointer(c.to), 0, 16);
    memcpy(shared_pointer(c.to), c.from, c.bytes);
  }
  copies[E.current].clear();
}

// --- numbers ---
inline float exp2_fast(float x) { return exp2f(x); }
inline float log2_fast(float x) { return log2f(x); }
inline float reciprocal_fast(float x) { return 1.f / x; }
inline float rsqrt_fast(float x) { return 1.f / sqrtf(x); }
inline float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
inline float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
inline float round_bf16(float x) { return bf16_to_f32(f32_to_bf16(x)); }
inline float half_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                     : exponent     ? ldexpf((float)(1024 + fraction), exponent - 25)
                                    : ldexpf((float)fraction, -24);
  return bits >> 15 ? -size : size;
}
inline uint16_t half_bits(float x) {
  const uint16_t sign = (uint16_t)(__float_as_uint(x) >> 16 & 0x8000);
  if (std::isnan(x)) return 0x7fff;
  const float size = fabsf(x);
  if (size == 0.f) return sign;
  if (size >= 65520.f) return sign | 0x7c00;
  int exponent;
  frexpf(size, &exponent);                            // size < 2^exponent
  const int unit = (exponent < -13 ? -13 : exponent) - 11;  // of the last place
  const int steps = (int)nearbyintf(ldexpf(size, -unit));   // to nearest, ties to even
  return sign | (uint16_t)(steps + (unit + 24) * 1024);  // 1024 steps further the exponent is one higher
}
inline uint32_t pack_half(float low, float high) { return half_bits(low) | (uint32_t)half_bits(high) << 16; }
inline float2 unpack_half(uint32_t pair) { return {half_value((uint16_t)pair), half_value((uint16_t)(pair >> 16))}; }
inline uint32_t multiply_half(uint32_t a, uint32_t b) {
  const float2 x = unpack_half(a), y = unpack_half(b);
  return pack_half(x.x * y.x, x.y * y.y);
}

// --- 8 x 8 matrices of 16-bit values, and products ---
template <int N, bool TRANSPOSED = false> void load_matrices(uint32_t (&d)[N], uint32_t address) {
  if (address & 15) refuse("a matrix row that is not on 16 bytes");
  const uint32_t* rows = everyone(address);
  const int lane = E.current % 32, row = lane / 4, column = lane % 4 * 2;
  for (int n = 0; n < N; n++) {
    uint16_t pair[2];
    for (int e = 0; e < 2; e++) {
      const int r = TRANSPOSED ? column + e : row, c = TRANSPOSED ? row : column + e;
      pair[e] = ((const uint16_t*)shared_pointer(rows[8 * n + r]))[c];
    }
    d[n] = pair[0] | (uint32_t)pair[1] << 16;
  }
}
inline uint32_t transpose_8x8(uint32_t pair) {
  const uint32_t* all = everyone(pair);
  const int lane = E.current % 32, row = lane / 4, column = lane % 4 * 2;
  const auto element = [&](int r, int c) { return all[r * 4 + c / 2] >> (c % 2 * 16) & 0xffffu; };
  return element(column, row) | element(column + 1, row) << 16;
}
struct Operands { uint32_t a[4], b[2]; };
template <class Value> void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Value value) {
  const Operands* all = everyone(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const int lane = E.current % 32, row = lane / 4, column = lane % 4 * 2;
  for (int e = 0; e < 4; e++) {
    float sum = d[e];
    for (int k = 0; k < 16; k++) {
      const int place = k % 8 / 2, half = k % 2 * 16;
      const float x = value((uint16_t)(all[row * 4 + place].a[k / 8 * 2 + e / 2] >> half));
      const float y = value((uint16_t)(all[(column + e % 2) * 4 + place].b[k / 8] >> half));
      sum = fmaf(x, y, sum);
    }
    d[e] = sum;
  }
}
inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma(d, a, b0, b1, [](uint16_t bits) { return bf16_to_f32(bits); });
}
inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma(d, a, b0, b1, half_value); }
inline void launch_dependents() {}
