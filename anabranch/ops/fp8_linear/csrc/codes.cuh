// E4M3 codes in bf16, exactly. The same source runs on a CPU, where a test walks through all 256 codes.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cstdint>
#include <cstring>

// Two codes, the first in the low byte, as two bf16 values in the same order. By way of fp16 and fp32 it is four
// instructions; the direct way from fp16 to bf16 is an instruction of low rate for each value.
__host__ __device__ __forceinline__ uint32_t widened(uint16_t codes) {
  const __half2 halves(__nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3));
  const float2 values = __half22float2(halves);
  const __nv_bfloat162 pair = __floats2bfloat162_rn(values.x, values.y);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}
