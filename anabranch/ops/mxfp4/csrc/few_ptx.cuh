// PTX of the MXFP4 products that neither ops/csrc/ptx.cuh nor their neighbours have.
#pragma once
#include "../kda_prefill/csrc/prefill_ptx.cuh"

using Map = CUtensorMap;

DEV uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  uint32_t c;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
// both halves of a by one half of b
DEV uint32_t multiply_by_low(uint32_t a, uint32_t b) {
  uint32_t c;
  asm("{\n.reg .b16 l, h;\n.reg .b32 t;\nmov.b32 {l, h}, %2;\nmov.b32 t, {l, l};\nmul.rn.bf16x2 %0, %1, t;\n}"
      : "=r"(c) : "r"(a), "r"(b));
  return c;
}
DEV uint32_t multiply_by_high(uint32_t a, uint32_t b) {
  uint32_t c;
  asm("{\n.reg .b16 l, h;\n.reg .b32 t;\nmov.b32 {l, h}, %2;\nmov.b32 t, {h, h};\nmul.rn.bf16x2 %0, %1, t;\n}"
      : "=r"(c) : "r"(a), "r"(b));
  return c;
}
DEV uint32_t load_word(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
DEV bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }
