// PTX of the streamed products that neither ops/csrc/ptx.cuh nor their neighbours have.
#pragma once
#include "../kda_prefill/csrc/prefill_ptx.cuh"
#include "../skinny_gemm/csrc/wgmma.cuh"

using Map = CUtensorMap;

// --- a box of a tensor of five dimensions, innermost coordinate first ---
DEV void load_box(uint32_t to, const Map& map, int a, int b, int c, int d, int e, uint32_t bar, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;"
      ::"r"(to), "l"(&map), "r"(a), "r"(b), "r"(c), "r"(d), "r"(e), "r"(bar), "l"(policy) : "memory");
}

// --- this thread arrives once the copies it has asked for are there; wgmma sees them behind the fence ---
DEV void arrive_behind_copies(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}
DEV void copies_to_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
