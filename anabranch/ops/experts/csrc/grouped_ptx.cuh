// PTX of the grouped products that neither ops/csrc/ptx.cuh nor their neighbours have.
#pragma once
#include "../kda_prefill/csrc/prefill_ptx.cuh"

using Map = CUtensorMap;

constexpr uint64_t kEvictNormal = 0x1000000000000000ull;

// --- registers of a warpgroup's threads ---
template <int N> DEV void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEV void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

// --- between the lanes of a warp, and the CTAs of a cluster ---
DEV int shuffle_xor(int x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEV int load_peer(const int* local, int rank) {
  int x;
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(x) : "r"(peer_address(shared_address(local), rank)) : "memory");
  return x;
}
