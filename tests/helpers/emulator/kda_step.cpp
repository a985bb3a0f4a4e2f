// The decode step built for a CPU: the kernel and its entry points as they are, with this launch.
#define ANABRANCH_EMULATE
#include "emulate.h"
#include "kernel.cuh"

template <class V>
int launch(const StepParams& p, bool, cudaStream_t) {
  for (int request = 0; request < p.requests; request++)
    for (int head = 0; head < p.heads; head++)
      emulate_cluster(V::SPLIT, V::THREADS, sizeof(Smem) + V::TILE_BYTES, head, request, [&] { kda_step_kernel<V>(p); });
  return 0;
}

#include "kda_step.cu"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(seed, [](int n) { emulate_seed = (unsigned)n; });
