// The shared host side of ops/csrc/launch.cuh on a CPU: maps that refuse what TMA would, CTAs one after the other.
#pragma once
#include "grouped.h"

enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_UINT16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 };

inline Map map_of(const void* data, CUtensorMapDataType, const Box& b) {
  Map m{(const char*)data};
  if ((uintptr_t)data % 16 || b.box[0] * 2 != 128) refuse("a tensor that TMA cannot read");
  for (int i = 0; i < 5; i++) m.size[i] = b.size[i], m.box[i] = b.box[i];
  for (int i = 0; i < 4; i++) {
    if (b.pitch[i] % 8) refuse("a pitch that is not on 16 bytes");
    m.pitch[i] = b.pitch[i];
  }
  return m;
}

template <auto KERNEL, class Params>
void launch_early(const Params& p, int ctas, int threads, size_t shared, DLDevice, int cluster = 1) {
  gridDim.x = ctas;
  for (int i = 0; i < ctas / cluster; i++) {
    emulate_cluster(cluster, threads, shared, i, 0, [&] { KERNEL(p); });
    if (!under_way.empty()) refuse("a program ended with data on the way");
  }
}
