// What the MXFP4 products of few pairs use beyond grouped.h: products of bf16 pairs, a word, a vote.
#pragma once
#include "grouped.h"

#include "../../../anabranch/ops/experts/csrc/activation.cuh"
#include "../../../anabranch/ops/experts/csrc/pieces.cuh"

inline uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  return pack_bf16(bf16_low(a) * bf16_low(b), bf16_high(a) * bf16_high(b));
}
inline uint32_t multiply_by_low(uint32_t a, uint32_t b) { return multiply_bf16(a, (b & 0xffff) * 0x10001); }
inline uint32_t multiply_by_high(uint32_t a, uint32_t b) { return multiply_bf16(a, (b >> 16) * 0x10001); }
inline uint32_t load_word(uint32_t address) { return *(const uint32_t*)shared_pointer(address); }
inline bool any_lane(bool x) { return lanes_where(x) != 0; }
