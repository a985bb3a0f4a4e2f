// The PTX of the chunked prefill beyond ops/csrc/ptx.cuh, one instruction a function. No policy here.
#pragma once
#include <cuda_fp16.h>

#include "ptx.cuh"

#define DEV __device__ __forceinline__
#define ASSUME(x) __builtin_assume(x)

template <class T>
DEV T& smem_base() {
  extern __shared__ __align__(1024) char raw_smem[];
  return *reinterpret_cast<T*>(raw_smem);
}

// --- copies of 16 bytes that do not pass through registers; with `bytes` 0 they write zeros and read nothing ---
DEV void copy_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
DEV void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// --- 8 x 8 matrices of 16-bit values: lane l gets row l / 4, columns l % 4 * 2 and the next ---
template <int N, bool TRANSPOSED = false>
DEV void load_matrices(uint32_t (&d)[N], uint32_t address) {
  if constexpr (N == 4 && TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(address) : "memory");
  else if constexpr (N == 4)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(address) : "memory");
  else if constexpr (N == 2 && TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(d[0]), "=r"(d[1]) : "r"(address) : "memory");
  else if constexpr (N == 1 && TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(d[0]) : "r"(address) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(d[0]) : "r"(address) : "memory");
}

// --- d += a b: 16 x 16 times 16 x 8 ---
DEV void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEV void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- one instruction each; denormals count as zero ---
DEV float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEV float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEV float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEV float rsqrt_fast(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// --- pairs of 16-bit values in a word, the first in the low half ---
DEV float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
DEV float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
DEV float round_bf16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }
DEV uint16_t half_bits(float x) { return __half_as_ushort(__float2half_rn(x)); }
DEV uint32_t pack_half(float low, float high) {
  __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&pair);
}
DEV float2 unpack_half(uint32_t pair) { return __half22float2(*reinterpret_cast<__half2*>(&pair)); }
DEV uint32_t multiply_half(uint32_t a, uint32_t b) {
  __half2 c = __hmul2_rn(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
  return *reinterpret_cast<uint32_t*>(&c);
}

// --- between the lanes of a warp ---
template <class T>
DEV T shuffle(T x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
template <class T>
DEV T shuffle_up(T x, int by) { return __shfl_up_sync(0xffffffffu, x, by); }
DEV uint32_t lanes_where(bool x) { return __ballot_sync(0xffffffffu, x); }
DEV int first_set(uint32_t x) { return __ffs(x) - 1; }

// --- the right operand of wgmma; below, rows are contraction steps: 64 columns apiece, `blocks` bytes apart, 128-byte
// swizzle, groups of 8 rows 1024 bytes apart ---
DEV uint64_t wgmma_operand_by_rows(uint32_t address, uint32_t blocks) {
  return (uint64_t)((address & 0x3FFFF) >> 4) | ((uint64_t)(blocks >> 4) << 16) | (64ull << 32) | (1ull << 62);
}

// --- 1-d bulk copy, counted in bytes on a barrier ---
DEV void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}

// --- four 8 x 8 matrices, transposed, to the rows whose addresses the lanes give ---
DEV void store_matrices_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
               ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
