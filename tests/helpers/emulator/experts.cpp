// The grouped products of the experts built for a CPU: kernels and entry points as they are, with these launches.
#define ANABRANCH_EMULATE
#include <tvm/ffi/container/tensor.h>

#include "grouped.cuh"
#include "grouped_sort.cuh"

Map map_of(const void* data, const Box& b) {
  Map m{(const char*)data};
  if ((uintptr_t)data % 16 || b.box[0] * 2 != 128) refuse("a tensor that TMA cannot read");
  for (int i = 0; i < 5; i++) m.size[i] = b.size[i], m.box[i] = b.box[i];
  for (int i = 0; i < 4; i++) {
    if (b.pitch[i] % 8) refuse("a pitch that is not on 16 bytes");
    m.pitch[i] = b.pitch[i];
  }
  return m;
}

template <bool GATE_UP>
void launch(const GroupedParams& p, int programs, DLDevice) {
  gridDim.x = programs;
  for (int i = 0; i < programs; i++)
    emulate_cluster(1, CONSUMERS + PRODUCERS, sizeof(GroupedSmem), i, 0, [&] { grouped_kernel<GATE_UP>(p); });
}

void launch_gather(const GatherParams& p, DLDevice) {
  for (int i = 0; i < p.slots * GATHER_BLOCKS; i++)
    emulate_cluster(1, GATHER_WARPS * 32, 0, i, 0, [&] { gather_kernel(p); });
}

void launch_sort(const SortParams& p, DLDevice) {
  emulate_cluster(SORT_CTAS, SORT_THREADS, sizeof(SortSmem), 0, 0, [&] { sort_kernel(p); });
}

#include "grouped.cu"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(seed, [](int n) { emulate_seed = (unsigned)n; });
