// PTX of the grouped products beyond ops/csrc/ptx.cuh, one instruction a function.
#pragma once
#include "ptx.cuh"

#define DEV __device__ __forceinline__
using Map = CUtensorMap;

template <class T>
DEV T& smem_base() {
  extern __shared__ __align__(1024) char raw_smem[];
  return *reinterpret_cast<T*>(raw_smem);
}

// --- a box of a tensor of five dimensions, innermost coordinate first ---
DEV void load_box(uint32_t to, const Map& map, int a, int b, int c, int d, int e, uint32_t bar, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;"
      ::"r"(to), "l"(&map), "r"(a), "r"(b), "r"(c), "r"(d), "r"(e), "r"(bar), "l"(policy) : "memory");
}
constexpr uint64_t kEvictNormal = 0x1000000000000000ull;

// --- four 8 x 8 matrices of 16-bit values, transposed, to the rows whose addresses the lanes give ---
DEV void store_matrices_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
               ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// --- registers of a warpgroup's threads ---
template <int N> DEV void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEV void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

// --- between the lanes of a warp, and the CTAs of a cluster ---
DEV int shuffle_up(int x, int by) { return __shfl_up_sync(0xffffffffu, x, by); }
DEV int shuffle_xor(int x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEV int load_peer(const int* local, int rank) {
  int x;
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(x) : "r"(peer_address(shared_address(local), rank)) : "memory");
  return x;
}
