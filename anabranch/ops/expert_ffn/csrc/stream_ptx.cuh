// The PTX of the few-token experts beyond ops/csrc/ptx.cuh, one instruction a function. No policy here.
#pragma once
#include "ptx.cuh"

#define DEV __device__ __forceinline__

template <class T>
DEV T& smem_base() {
  extern __shared__ __align__(128) char raw_smem[];
  return *reinterpret_cast<T*>(raw_smem);
}

// Weights pass once: they are the first to leave L2.
DEV void copy_weights(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
      ::"r"(to), "l"(from), "r"(bytes), "r"(bar), "l"(kEvictFirst) : "memory");
}
DEV void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// What an earlier kernel of the chain wrote: past L1, which may hold older bytes. `early` may be read before the wait.
DEV uint4 load_written(const void* p) { return __ldcg(static_cast<const uint4*>(p)); }
DEV int64_t load_early(const int64_t* p) { return __ldcg(reinterpret_cast<const long long*>(p)); }
DEV float load_early(const float* p) { return __ldcg(p); }
DEV void store_result(uint16_t* p, uint16_t value) { *p = value; }

// d += a b: 16 x 16 times 16 x 8
DEV void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEV float bf16_to_f32(uint32_t bits) { return __uint_as_float(bits << 16); }
DEV uint16_t f32_to_bf16(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
DEV float round_bf16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }
