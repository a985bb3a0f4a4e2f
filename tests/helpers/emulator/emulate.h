// The CUDA features that the decode step uses, on a CPU: one cluster at a time, one fiber a thread.
//
// Shared memory starts as NaN. Fibers run in an order drawn from `emulate_seed`, each until it has to wait, and a third
// of them sit out every round, so that a missing barrier shows; what is sent to another CTA arrives late and out of order.
// What a kernel may not do before griddepcontrol.wait (write the state, start its dependents) aborts.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define DEV inline
#define ASSUME(x)
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
typedef void* cudaStream_t;

struct uint4 { uint32_t x, y, z, w; };
struct float4 { float x, y, z, w; };
struct Index { int x = 0, y = 0, z = 0; };
inline uint4 make_uint4(uint32_t a, uint32_t b, uint32_t c, uint32_t d) { return {a, b, c, d}; }
inline Index threadIdx, blockIdx;
inline unsigned emulate_seed = 1;

inline float __uint_as_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
inline uint32_t __float_as_uint(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float bf16_to_f32(uint32_t bits) { return __uint_as_float(bits << 16); }
inline uint16_t f32_to_bf16(float x) {
  if (std::isnan(x)) return 0x7fff;
  const uint32_t u = __float_as_uint(x);
  return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline uint32_t pack_bf16(float lo, float hi) { return f32_to_bf16(lo) | ((uint32_t)f32_to_bf16(hi) << 16); }

struct Fiber { ucontext_t context; Index thread, block; int cta = 0; long cluster_phase = 0; bool done = false, waited = false; };
struct Cta { std::vector<char> shared; int arrived = 0; long generation = 0; };
struct Warp { float value[2][32]; int arrived = 0; long generation = 0; };
struct Message { float* to; uint64_t* bar; int cta; float value; unsigned delay; };  // to another CTA, under way
struct Emulator {
  ucontext_t main;
  std::vector<Fiber> fibers;
  std::vector<Cta> ctas;
  std::vector<Warp> warps;
  std::vector<char*> stacks;
  std::vector<Message> sent;
  int current = 0, threads = 0, cluster_arrived = 0;
  long cluster_phase = 0;
  std::function<void()> body;
};
inline Emulator E;

inline Fiber& me() { return E.fibers[E.current]; }
inline void yield() { swapcontext(&me().context, &E.main); }
inline void fiber_main() { E.body(); me().done = true; yield(); }
inline void refuse(const char* what) { fprintf(stderr, "emulator: %s\n", what); abort(); }
inline unsigned draw() { return emulate_seed = emulate_seed * 1664525u + 1013904223u, emulate_seed >> 8; }

inline void deliver();
inline void start_fibers(int split, int threads, int cluster, int request) {
  constexpr size_t STACK = 1 << 17;
  for (int i = 0; i < split * threads; i++) {
    if ((int)E.stacks.size() <= i) E.stacks.push_back((char*)malloc(STACK));
    Fiber& f = E.fibers[i];
    f.cta = i / threads, f.thread.x = i % threads, f.block.x = cluster * split + f.cta, f.block.y = request;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = E.stacks[i], f.context.uc_stack.ss_size = STACK, f.context.uc_link = &E.main;
    makecontext(&f.context, fiber_main, 0);
  }
}
inline void emulate_cluster(int split, int threads, size_t shared, int cluster, int request, std::function<void()> body) {
  const int n = split * threads;
  E.threads = threads, E.body = body, E.cluster_arrived = 0, E.cluster_phase = 0;
  E.fibers.assign(n, Fiber()), E.ctas.assign(split, Cta()), E.warps.assign(n / 32, Warp());
  for (Cta& c : E.ctas) c.shared.assign(shared + 128, (char)0xff);
  start_fibers(split, threads, cluster, request);
  long rounds = 0;
  for (bool any = true; any;) {
    any = false;
    deliver();
    const unsigned first = draw() % n;
    for (int k = 0; k < n; k++) {
      const int i = (first + k) % n;
      if (E.fibers[i].done) continue;
      any = true;
      if (draw() % 3 == 0) continue;
      E.current = i, threadIdx = E.fibers[i].thread, blockIdx = E.fibers[i].block;
      swapcontext(&E.main, &E.fibers[i].context);
    }
    if (++rounds > 1000000) refuse("deadlock");
  }
  if (!E.sent.empty()) refuse("a CTA ended with data on the way to it");
}

inline char* shared_of(int cta) { return (char*)(((uintptr_t)E.ctas[cta].shared.data() + 127) & ~(uintptr_t)127); }
template <class T> T& smem_base() { return *(T*)shared_of(me().cta); }
inline char* remote(void* local, int cta) { return shared_of(cta) + ((char*)local - shared_of(me().cta)); }

inline float __shfl_xor_sync(uint32_t, float v, int mask) {
  Warp& w = E.warps[E.current / 32];
  const int lane = E.current % 32;
  const long g = w.generation;
  w.value[g & 1][lane] = v;
  if (++w.arrived == 32) w.arrived = 0, w.generation++;
  else while (w.generation == g) yield();
  return w.value[g & 1][lane ^ mask];
}
inline void __syncwarp() { __shfl_xor_sync(0, 0.f, 0); }
inline void __syncthreads() {
  Cta& c = E.ctas[me().cta];
  const long g = c.generation;
  if (++c.arrived == E.threads) c.arrived = 0, c.generation++;
  else while (c.generation == g) yield();
}
inline void cluster_arrive_relaxed() {
  if (++E.cluster_arrived == (int)E.fibers.size()) E.cluster_arrived = 0, E.cluster_phase++;
}
inline void cluster_wait() { for (long want = me().cluster_phase++; E.cluster_phase <= want;) yield(); }

// An mbarrier as in the PTX manual: a phase ends when no arrival and no byte is pending; bytes may come early.
struct Mbarrier { int32_t bytes; uint16_t pending, phase; };
static_assert(sizeof(Mbarrier) == sizeof(uint64_t));
inline void complete(Mbarrier* b) { if (!b->pending && !b->bytes) b->phase ^= 1, b->pending = 1; }
inline void mbar_init(uint64_t* b) { *(Mbarrier*)b = {0, 1, 0}; }
inline void mbar_fence() {}
inline void mbar_expect(uint64_t* b, uint32_t n) {
  Mbarrier* m = (Mbarrier*)b;
  if (!m->pending) refuse("two arrivals in one phase");
  m->bytes += n, m->pending--, complete(m);
}
inline void mbar_bytes(uint64_t* b, uint32_t n) { ((Mbarrier*)b)->bytes -= n, complete((Mbarrier*)b); }
inline void mbar_wait(uint64_t* b, uint32_t parity) { while (((Mbarrier*)b)->phase == parity) yield(); }

inline void griddep_wait() { me().waited = true; }
inline void needs_wait(const char* what) { if (!me().waited) refuse(what); }
inline void griddep_launch_at_once() {}
inline void griddep_launch() { needs_wait("dependents started before griddepcontrol.wait"); }

inline uint64_t policy_evict_first() { return 0; }
template <bool HINT> uint4 ld_state(const void* p, uint64_t) { return *(const uint4*)p; }
template <bool HINT> void st_state(void* p, uint4 v, uint64_t) { needs_wait("state stored early"), *(uint4*)p = v; }
template <bool HINT> void bulk_load(void* to, const void* from, uint32_t n, uint64_t* bar, uint64_t) { memcpy(to, from, n), mbar_bytes(bar, n); }
template <bool HINT> void bulk_store(void* to, const void* from, uint32_t n, uint64_t) { needs_wait("state stored early"), memcpy(to, from, n); }
inline void fence_async_proxy() {}
inline void bulk_store_wait() {}
inline void bulk_prefetch(const void* p, uint32_t n) { volatile char c = ((const char*)p)[0]; c = ((const char*)p)[n - 1], (void)c; }
inline void st_async_cluster(float* local, uint64_t* bar, int cta, float v) {
  E.sent.push_back({(float*)remote(local, cta), (uint64_t*)remote(bar, cta), cta, v, draw() % 64 ? 4u : 384u});
}
inline void deliver() {
  std::vector<Message> later;
  for (const Message& m : E.sent) {
    if (draw() % m.delay) { later.push_back(m); continue; }
    bool there = false;
    for (const Fiber& f : E.fibers) there |= f.cta == m.cta && !f.done;
    if (!there) refuse("a CTA ended with data on the way to it");
    *m.to = m.value, mbar_bytes(m.bar, 4);
  }
  E.sent = later;
}
