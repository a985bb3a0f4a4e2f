// The PTX of latent attention beyond the chunked prefill's, one instruction a function. No policy here.
#pragma once
#include "../kda_prefill/csrc/prefill_ptx.cuh"

// Orders this thread's accesses to shared memory before bulk copies into it that follow a barrier.
DEV void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- registers between warpgroups, counted for one thread ---
template <int N> DEV void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEV void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
