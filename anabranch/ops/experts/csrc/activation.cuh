// The gated activations with the roundings of ops/glu/triton.py, so that both give the same bits.
#pragma once

struct Activation {
  float beta, inverse_beta, linear_beta, inverse_linear_beta;  // linear_beta 0: the linear part has no cap
  int situ;
};

// linear_beta 0: no cap
inline Activation activation_of(bool situ, double beta, double linear_beta) {
  return {(float)beta, (float)(1 / beta), (float)linear_beta, linear_beta != 0 ? (float)(1 / linear_beta) : 0.f, situ};
}

DEV float sigmoid32(float x) { return __frcp_rn(__fadd_rn(1.f, expf(-x))); }

// (1 - e) / (1 + e) with e = exp(-2|x|), and its series where that would cancel
DEV float tanh32(float x) {
  const float size = fabsf(x), e = expf(-2.f * size), s = __fmul_rn(x, x);
  const float far = __fdiv_rn(__fadd_rn(1.f, -e), __fadd_rn(1.f, e));
  float near = __fadd_rn((float)(17.0 / 315), -__fmul_rn(s, (float)(62.0 / 2835)));
  near = __fadd_rn((float)(2.0 / 15), -__fmul_rn(s, near));
  near = __fadd_rn((float)(1.0 / 3), -__fmul_rn(s, near));
  near = __fmul_rn(size, __fadd_rn(1.f, -__fmul_rn(s, near)));
  return copysignf(size < 0.25f ? near : far, x);
}

// act(gate, up) of two tokens: pairs of bf16, the first in the low half
template <bool SITU>
DEV uint32_t activate(uint32_t gate, uint32_t up, const Activation& a) {
  float g[2] = {bf16_low(gate), bf16_high(gate)}, u[2] = {bf16_low(up), bf16_high(up)};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if constexpr (SITU) {
      g[i] = __fmul_rn(__fmul_rn(a.beta, tanh32(__fmul_rn(g[i], a.inverse_beta))), sigmoid32(g[i]));
      if (a.linear_beta != 0.f) u[i] = __fmul_rn(a.linear_beta, tanh32(__fmul_rn(u[i], a.inverse_linear_beta)));
    } else {
      g[i] = __fmul_rn(g[i], sigmoid32(g[i]));
    }
  }
  if constexpr (!SITU) {
    const uint32_t silu = pack_bf16(g[0], g[1]);
    g[0] = bf16_low(silu), g[1] = bf16_high(silu);
  }
  return pack_bf16(__fmul_rn(g[0], u[0]), __fmul_rn(g[1], u[1]));
}
