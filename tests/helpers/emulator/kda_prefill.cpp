// The chunked prefill's CUDA kernels built for a CPU: kernels and entry points as they are, with these launches.
#define ANABRANCH_EMULATE
#include <tvm/ffi/container/tensor.h>

#include "chain.cuh"
#include "prepare.cuh"

void launch_prepare(const PrepareParams& p, int heads, int chunks, DLDevice) {
  gridDim.x = heads, gridDim.y = chunks;
  for (int chunk = 0; chunk < chunks; chunk++)
    for (int head = 0; head < heads; head++)
      emulate_cluster(1, GROUPS * 32, sizeof(PrepareSmem), head, chunk, [&] { kda_prepare_kernel(p); });
}

void launch_chain(const ChainParams& p, const ChainMaps& maps, int heads, int segments, DLDevice) {
  gridDim.x = 2, gridDim.y = heads, gridDim.z = segments;
  for (int segment = 0; segment < segments; segment++)
    for (int head = 0; head < heads; head++)
      for (int half = 0; half < 2; half++)
        emulate_cluster(1, Chain::THREADS, sizeof(ChainSmem), half, head, [&] {
          me().block.z = segment, blockIdx = me().block;
          kda_chain_kernel(p, maps);
        });
}

#include "kda_prefill.cu"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(seed, [](int n) { emulate_seed = (unsigned)n; });
