// Latent attention's CUDA kernels built for a CPU: kernels and entry points as they are, with these launches.
#define ANABRANCH_EMULATE
#include <tvm/ffi/container/tensor.h>

#include <map>

#include "hopper.h"

struct Met { int arrived = 0; long generation = 0; };
inline std::map<int, Met> met;
inline void named_barrier(int id, int threads) {
  Met& m = met[id];
  const long g = m.generation;
  if (++m.arrived == threads) m.arrived = 0, m.generation++;
  else while (m.generation == g) yield();
}
using std::fmaxf;
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __frcp_rn(float a) { return 1.f / a; }

#include "attend.cuh"
#include "leave.cuh"

template <int MT> int launch(const AttendParams& p, int programs, bool, DLDevice) {
  constexpr int bytes = sizeof(AttendSmem<MT>), heads = 16 * MT;
  if (bytes > 232448) refuse("more shared memory than a CTA may have");
  gridDim.x = programs;
  for (int block = 0; block < (p.heads + heads - 1) / heads; block++)
    for (int program = 0; program < programs; program++) {
      met.clear();
      emulate_cluster(1, THREADS, bytes, program, block, [&] { mla_attend_kernel<MT>(p); });
      if (!under_way.empty()) refuse("a program ended with data on the way");
    }
  return 0;
}

int launch_leave(const LeaveParams& p, bool, DLDevice) {
  for (int b = 0; b < p.requests && !p.weight; b++)
    for (int pair = 0; pair * MERGE_HEADS < p.heads; pair++)
      emulate_cluster(1, LEAVE_THREADS, 0, pair, b, [&] { mla_merge_kernel(p); });
  for (int b = 0; b < p.requests && p.weight; b++)
    for (int h = 0; h < p.heads; h++)
      for (int part = 0; part * COLUMNS < p.width; part++) {
        emulate_cluster(1, LEAVE_THREADS, sizeof(LeaveSmem), part, h, [&] {
          me().block.z = b, blockIdx = me().block;
          mla_leave_kernel(p);
        });
        if (!under_way.empty()) refuse("a program ended with data on the way");
      }
  return 0;
}

#include "mla.cu"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(seed, [](int n) { emulate_seed = (unsigned)n; });
