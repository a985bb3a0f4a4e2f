// The instructions of one token's experts beyond ops/csrc/ptx.cuh. No policy here.
#pragma once
#include "ptx.cuh"

#define DEV __device__ __forceinline__

template <class T>
DEV T& smem_base() {
  extern __shared__ __align__(128) char raw_smem[];
  return *reinterpret_cast<T*>(raw_smem);
}

// 16 bytes of weights, which pass once; zeros where they are not wanted. Volatile: the order of the program is kept.
DEV uint4 stream(const uint16_t* p, bool wanted) {
  uint4 v;
  asm volatile(
      "{\n.reg .pred q;\nsetp.ne.u32 q, %5, 0;\n"
      "mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
      "@q ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];\n}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(p), "r"((uint32_t)wanted));
  return v;
}

// What an earlier kernel of the chain wrote: past L1, which may hold older bytes. `early` may be read before the wait.
DEV uint4 load_written(const void* p) { return __ldcg(static_cast<const uint4*>(p)); }
DEV int64_t load_early(const int64_t* p) { return __ldcg(reinterpret_cast<const long long*>(p)); }
DEV float load_early(const float* p) { return __ldcg(p); }
DEV void store_result(uint16_t* p, uint16_t value) { *p = value; }

template <class T> DEV T shuffle(T x, int lane) { return __shfl_sync(~0u, x, lane); }

DEV uint16_t f32_to_bf16(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
DEV float round_bf16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }
