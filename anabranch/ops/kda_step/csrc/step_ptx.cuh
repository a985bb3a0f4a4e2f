// The PTX of the decode step (sm_90a), one instruction a function. No policy here.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#define DEV __device__ __forceinline__
#define ASSUME(x) __builtin_assume(x)

// --- programmatic dependent launch ---
DEV void griddep_launch() { asm volatile("griddepcontrol.launch_dependents;"); }
DEV void griddep_launch_at_once() { griddep_launch(); }  // the emulator forbids the other before the wait
DEV void griddep_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// --- shared memory ---
DEV uint32_t smem_addr(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
template <class T>
DEV T& smem_base() {
  extern __shared__ __align__(128) char raw_smem[];
  return *reinterpret_cast<T*>(raw_smem);
}

// --- bf16 as raw bits, rounded to nearest even ---
DEV float bf16_to_f32(uint32_t bits) { return __uint_as_float(bits << 16); }
DEV uint16_t f32_to_bf16(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
DEV uint32_t pack_bf16(float lo, float hi) {
  __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
  return *reinterpret_cast<uint32_t*>(&v);
}

// --- 16-byte streaming access to the state, which L1 never helps; HINT: first to leave L2 ---
DEV uint64_t policy_evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
template <bool HINT>
DEV uint4 ld_state(const void* p, uint64_t policy) {
  uint4 v;
  if constexpr (HINT)
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p), "l"(policy));
  else
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
  return v;
}
template <bool HINT>
DEV void st_state(void* p, uint4 v, uint64_t policy) {
  if constexpr (HINT)
    asm volatile("st.global.L1::no_allocate.L2::cache_hint.v4.u32 [%0], {%1,%2,%3,%4}, %5;" ::"l"(p), "r"(v.x),
                 "r"(v.y), "r"(v.z), "r"(v.w), "l"(policy)
                 : "memory");
  else
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// --- mbarrier, and bulk copies that count their bytes on it ---
DEV void mbar_init(uint64_t* bar) { asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(smem_addr(bar)) : "memory"); }
DEV void mbar_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEV void mbar_expect(uint64_t* bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(smem_addr(bar)), "r"(bytes) : "memory");
}
DEV void mbar_wait(uint64_t* bar, uint32_t parity) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tW_%=: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n\t@!p bra W_%=;\n\t}" ::"r"(
          smem_addr(bar)),
      "r"(parity)
      : "memory");
}
template <bool HINT>
DEV void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* bar, uint64_t policy) {
  if constexpr (HINT)
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(smem_addr(to)),
        "l"(from), "r"(bytes), "r"(smem_addr(bar)), "l"(policy)
        : "memory");
  else
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     smem_addr(to)),
                 "l"(from), "r"(bytes), "r"(smem_addr(bar))
                 : "memory");
}
DEV void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
template <bool HINT>
DEV void bulk_store(void* to, const void* from, uint32_t bytes, uint64_t policy) {
  if constexpr (HINT)
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to),
                 "r"(smem_addr(from)), "r"(bytes), "l"(policy)
                 : "memory");
  else
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(smem_addr(from)),
                 "r"(bytes)
                 : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
DEV void bulk_store_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEV void bulk_prefetch(const void* p, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes));
}

// --- cluster ---
DEV void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEV void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// One float to the same offset of another CTA's shared memory, counted on that CTA's barrier: data and signal in one,
// where a releasing barrier.cluster.arrive would cost a memory barrier of the whole GPU.
DEV void st_async_cluster(float* local, uint64_t* bar, int cta, float v) {
  uint32_t to, its_bar;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(smem_addr(local)), "r"(cta));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(its_bar) : "r"(smem_addr(bar)), "r"(cta));
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(v),
               "r"(its_bar)
               : "memory");
}
