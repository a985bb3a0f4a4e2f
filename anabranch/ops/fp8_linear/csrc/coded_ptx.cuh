// PTX of the block-FP8 product beyond ops/csrc/ptx.cuh.
#pragma once
#include "ptx.cuh"

// no use of these operands moves across this point
template <int R> DEVICE void pin(uint32_t (&d)[R]) {
#pragma unroll
  for (int i = 0; i < R; i++) asm volatile("" : "+r"(d[i])::"memory");
}
DEVICE uint16_t load_two(uint32_t address) {
  uint16_t codes;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(codes) : "r"(address));
  return codes;
}
// registers of a warpgroup's threads
template <int N> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
