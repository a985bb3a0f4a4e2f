// The router built for a CPU: kernels and entry point as they are, with this launch.
#define ANABRANCH_EMULATE
#define __maxnreg__(...)
#include <tvm/ffi/container/tensor.h>

#include <utility>

#include "matrix.h"

// --- what router_ptx.cuh has beyond matrix.h; nothing of an earlier kernel's is read or written before the wait ---
inline long asked = 0;  // bytes of weights
inline uint4 stream(const uint16_t* p, bool wanted) {
  if (wanted && (uintptr_t)p % 16) refuse("weights that are not on 16 bytes");
  asked += wanted ? 16 : 0;
  return wanted ? *(const uint4*)p : make_uint4(0, 0, 0, 0);
}
inline float load_weight(const float* p) { return *p; }
inline uint4 load_written(const void* p) { return needs_wait("a token read early"), *(const uint4*)p; }
inline void store_written(uint16_t* p, const uint4& v) { needs_wait("a row stored early"), *(uint4*)p = v; }
template <class T> void store_choice(T* p, T value) { needs_wait("a choice stored early"), *p = value; }
struct Mail { uint64_t a, b; };
inline Mail read_mail(const uint64_t* p) {
  if ((uintptr_t)p % 16) refuse("mail that is not on 16 bytes");
  return needs_wait("mail read early"), Mail{p[0], p[1]};
}
inline void send_mail(uint64_t* p, uint64_t word) {
  needs_wait("mail sent early");
  if (*p) refuse("a box that was not empty");
  *p = word;
}
inline void clear_mail(uint64_t* p) { p[0] = p[1] = 0; }
template <class Operation> uint32_t by_pair(uint32_t a, uint32_t b, Operation f) {
  return pack_bf16(f(bf16_low(a), bf16_low(b)), f(bf16_high(a), bf16_high(b)));
}
inline uint32_t add_pair(uint32_t a, uint32_t b) { return by_pair(a, b, [](float x, float y) { return x + y; }); }
inline uint32_t multiply_pair(uint32_t a, uint32_t b) { return by_pair(a, b, [](float x, float y) { return x * y; }); }
inline float divide(float a, float b) { return a / b; }
inline float reciprocal_root(float x) { return 1.f / sqrtf(x); }
inline void pin(uint4&) {}
inline uint32_t least(uint32_t x) {
  const uint32_t* all = everyone(x);
  uint32_t found = ~0u;
  for (int i = 0; i < 32; i++) found = all[i] < found ? all[i] : found;
  return found;
}
inline void warp_barrier() { __syncwarp(); }
inline int set_bits(uint32_t x) { return __builtin_popcount(x); }
template <class T> int minus_greater(T a, T b) { return a > b ? -1 : 0; }
inline void store_if(bool wanted, uint4* p, const uint4& v) { if (wanted) *p = v; }
inline void wait_for_previous() { griddep_wait(); }
#define launch_dependents griddep_launch  // aborts before the wait

#include "router.cuh"

template <auto kernel>
void launch(const RouteParams& p, int blocks, int bytes, bool, DLDevice) {
  gridDim.x = blocks;  // one after the other: a block that waited for one behind it would hang
  for (int block = 0; block < blocks; block++) emulate_cluster(1, THREADS, bytes, block, 0, [&] { kernel(p); });
}

#include "router.cu"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(seed, [](int n) { emulate_seed = (unsigned)n; });
TVM_FFI_DLL_EXPORT_TYPED_FUNC(asked, [] { return std::exchange(asked, 0); });
