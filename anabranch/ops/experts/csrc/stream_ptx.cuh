// PTX of the streamed products that neither ops/csrc/ptx.cuh nor their neighbours have.
#pragma once
#include "../kda_prefill/csrc/prefill_ptx.cuh"
#include "wgmma.cuh"

using Map = CUtensorMap;

// --- this thread arrives once the copies it has asked for are there; wgmma sees them behind the fence ---
DEV void arrive_behind_copies(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}
DEV void copies_to_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
