// Arguments of the decode step, and the arithmetic that all its variants share: bits depend on nothing else.
//
// A state row (one value channel, 128 keys) lives in 8 lanes with 16 keys each, and every sum over it is taken in the
// same order whatever the number of CTAs, threads or copies is.
#pragma once
#ifdef ANABRANCH_EMULATE
#include "emulate.h"
#else
#include "step_ptx.cuh"
#endif

constexpr int D = 128;                             // channels of a head, keys and values alike
constexpr int LANES = 8;                           // lanes of a state row
constexpr float Q_SCALE = 0.08838834764831845f;    // D^-1/2

// Strides are in elements and 64-bit: rows may be slices of wider rows, pools may lie beyond 2^31 elements.
// B requests of T tokens, request-major: row b * T + t. P = heads * D.
struct StepParams {
  const uint16_t* qkv;       // [B*T, 3P] bf16 raw projections q|k|v
  const uint16_t* forget;    // [B*T, P] bf16 decay logits, or [B*T, D] = f_a's output where f_b is given
  const uint16_t* f_b;       // [P, D] bf16 or null
  const uint16_t* beta;      // [B*T, heads] bf16 write-strength logits
  const uint16_t* gate;      // [B*T, P] bf16 output-gate logits
  uint16_t* conv;            // [slots, 3, 3P] bf16 windows of raw rows, oldest first
  void* state;               // [slots, heads, D(value), D(key)] fp32 or bf16
  const int64_t* slots;      // [B] where a request's state is read; outside the pool: nothing is touched, output zero
  const int64_t* keep;       // [B, T] where the state after each token goes, outside the pool: nowhere.
                             // Null: after the last token to where it was read
  const float* conv_weight;  // [3P, 4], tap 3 for the newest row
  const float* a_log;        // [heads]
  const float* dt_bias;      // [P]
  const float* norm_weight;  // [D]
  uint16_t* out;             // [B*T, P] bf16, dense
  int64_t qkv_stride, forget_stride, beta_stride, gate_stride;
  int64_t slot_stride, keep_stride, keep_step, conv_pitch, state_pitch;
  int requests, tokens, heads, pool;
  float lower_bound;  // < 0: g = lower_bound * sigmoid(rate * zeta); 0: g = -rate * softplus(zeta)
  float eps;
  int early;     // 1: slots, keep, pools and weights are read before griddepcontrol.wait
  int release;   // when dependents may start: AT_ONCE, BEHIND_WAIT or BEHIND_PASS
  int prefetch;  // heads ahead whose state is pulled into L2 (one CTA a head only); 0: off
};

DEV float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }
DEV float round_bf16(float x) { return bf16_to_f32(f32_to_bf16(x)); }
DEV float xor_sum(float x, int mask) { return x + __shfl_xor_sync(0xffffffffu, x, mask); }
DEV float row_sum(float x) { return xor_sum(xor_sum(xor_sum(x, 1), 2), 4); }

DEV float decay_of(float zeta, float rate, float lower_bound) {
  if (lower_bound < 0.f) return __expf(lower_bound * sigmoid(rate * zeta));
  return __expf(-rate * (zeta > 20.f ? zeta : log1pf(__expf(zeta))));
}

// Four taps and SiLU, rounded to bf16 as a separate convolution would round its output.
DEV float convolve(float4 w, const uint32_t (&window)[3], uint32_t newest) {
  float y = w.x * bf16_to_f32(window[0]);
  y = fmaf(w.y, bf16_to_f32(window[1]), y);
  y = fmaf(w.z, bf16_to_f32(window[2]), y);
  y = fmaf(w.w, bf16_to_f32(newest), y);
  return round_bf16(__fdividef(y, 1.f + __expf(-y)));
}

DEV float dot8(uint4 a, uint4 b, float acc) {  // 8 bf16 products
  const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    acc = fmaf(bf16_to_f32(x[i] & 0xffffu), bf16_to_f32(y[i] & 0xffffu), acc);
    acc = fmaf(__uint_as_float(x[i] & 0xffff0000u), __uint_as_float(y[i] & 0xffff0000u), acc);
  }
  return acc;
}

// Where channel c of q, k and the decay lies in shared memory: lane l of a row reads float4 number j * 8 + l, j = 0..3.
// With fp32 state that is channel order. A 16-byte load of bf16 state holds 8 channels, so the two float4 halves of each
// such octet lie 16 float4 apart.
template <class State>
DEV int lane_order(int c) {
  return sizeof(State) == 4 ? c : (((c >> 3) + ((c >> 2) & 1) * 16) << 2) + (c & 3);
}

// A lane's 16 state values between registers (lane order) and 16-byte pieces of memory: 4 pieces of fp32, 2 of bf16.
DEV void unpack(const uint4 (&raw)[4], float (&S)[16]) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    S[4 * j] = __uint_as_float(raw[j].x), S[4 * j + 1] = __uint_as_float(raw[j].y);
    S[4 * j + 2] = __uint_as_float(raw[j].z), S[4 * j + 3] = __uint_as_float(raw[j].w);
  }
}
DEV void pack(const float (&S)[16], uint4 (&raw)[4]) {
#pragma unroll
  for (int j = 0; j < 4; j++)
    raw[j] = make_uint4(__float_as_uint(S[4 * j]), __float_as_uint(S[4 * j + 1]), __float_as_uint(S[4 * j + 2]),
                        __float_as_uint(S[4 * j + 3]));
}
DEV void unpack(const uint4 (&raw)[2], float (&S)[16]) {
#pragma unroll
  for (int c = 0; c < 2; c++) {
    const uint32_t words[4] = {raw[c].x, raw[c].y, raw[c].z, raw[c].w};
#pragma unroll
    for (int i = 0; i < 4; i++) {  // words 0, 1 are float4 c; words 2, 3 are float4 2 + c
      const int at = 4 * ((i >> 1) * 2 + c) + 2 * (i & 1);
      S[at] = bf16_to_f32(words[i] & 0xffffu), S[at + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
}
DEV void pack(const float (&S)[16], uint4 (&raw)[2]) {
#pragma unroll
  for (int c = 0; c < 2; c++)
    raw[c] = make_uint4(pack_bf16(S[4 * c], S[4 * c + 1]), pack_bf16(S[4 * c + 2], S[4 * c + 3]),
                        pack_bf16(S[4 * c + 8], S[4 * c + 9]), pack_bf16(S[4 * c + 10], S[4 * c + 11]));
}
