// Eight E2M1 codes of a 32-bit word as bf16 pairs, in the order of ops/mxfp4/triton.py: nibbles N and N + 4.
#pragma once

constexpr uint32_t KEPT = 0x81C081C0;  // sign and the three other bits, moved to 15 and 8 .. 6: the value times 2^-126

// bf16 2^(s - 1) of the scale bytes 0 and 2 of x & 0x00FF00FF: with 2^126 in it one exact product makes a weight.
// Scales from 128 (2^1) on take `Wide`: 129 would not fit, and one bit tells 128.
DEV uint32_t powers(uint32_t bytes) { return bytes * 128 + 0x3F003F00; }

template <int N>
DEV uint32_t moved(uint32_t word) {
  const uint32_t nibbles = (N < 2 ? word : word >> 8) & (N % 2 ? 0x00F000F0 : 0x000F000F);
  return nibbles * (N % 2 ? 0x104 : 0x1040) & KEPT;
}

// The four scales of a block of 128 columns of one row
struct Plain {  // all at most 127
  uint32_t even, odd;
  Plain() = default;
  DEV explicit Plain(uint32_t scales) : even(powers(scales & 0x00FF00FF)), odd(powers(scales >> 8 & 0x00FF00FF)) {}
  template <int GROUP> DEV uint32_t times(uint32_t x) const {
    const uint32_t pair = GROUP % 2 ? odd : even;
    return GROUP / 2 ? multiply_by_high(x, pair) : multiply_by_low(x, pair);
  }
};
struct Wide {  // any: 0 is 2^-127, 255 is NaN
  uint32_t scales;
  Wide() = default;
  DEV explicit Wide(uint32_t scales) : scales(scales) {}
  template <int GROUP> DEV uint32_t times(uint32_t x) const {
    const uint32_t s = scales >> (8 * GROUP) & 255, power = s == 0 ? 0x40 : s == 255 ? 0x7FC0 : s << 7;
    return multiply_bf16(multiply_bf16(x, 0x7E807E80), power * 0x10001);
  }
};
