// One token's experts built for a CPU: kernels and entry points as they are, with this launch.
#define ANABRANCH_EMULATE
#define __maxnreg__(...)
#include <tvm/ffi/container/tensor.h>

#include <type_traits>
#include <utility>

#include "matrix.h"

// --- what gemv_ptx.cuh has beyond matrix.h; the first launch reads and writes nothing of an earlier kernel's before it
// has waited, the second may read the router's choice ---
inline bool first_launch = false;
inline long asked = 0;  // bytes of weights
inline uint4 stream(const uint16_t* p, bool wanted) {
  if (wanted && (uintptr_t)p % 16) refuse("weights that are not on 16 bytes");
  asked += wanted ? 16 : 0;
  return wanted ? *(const uint4*)p : make_uint4(0, 0, 0, 0);
}
inline uint4 load_written(const void* p) { return needs_wait("hidden rows read early"), *(const uint4*)p; }
template <class T> T load_early(const T* p) {
  if (first_launch) needs_wait("the router's choice read early");
  return *p;
}
inline void store_result(uint16_t* p, uint16_t value) { needs_wait("a result stored early"), *p = value; }
inline void prefetch_l2(const void* p) { volatile char c = *(const char*)p; (void)c; }
inline void wait_for_previous() { griddep_wait(); }
#define launch_dependents griddep_launch  // aborts before the wait
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }

#include "down.cuh"
#include "gate_up.cuh"

template <auto kernel, class Params>
void launch(const Params& p, int blocks, int bytes, bool, DLDevice) {
  gridDim.x = blocks, first_launch = std::is_same_v<Params, GateUpParams>;
  for (int block = 0; block < blocks; block++) emulate_cluster(1, p.warps * 32, bytes, block, 0, [&] { kernel(p); });
}

#include "expert_ffn.cu"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(seed, [](int n) { emulate_seed = (unsigned)n; });
TVM_FFI_DLL_EXPORT_TYPED_FUNC(asked, [] { return std::exchange(asked, 0); });
