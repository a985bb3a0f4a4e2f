// Host side of grouped.cuh: tensor maps and launch. Shapes, dtypes and strides are checked by the caller (grouped.py).
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include "grouped.cuh"
#include "grouped_sort.cuh"

using tvm::ffi::TensorView;

namespace {

#ifndef ANABRANCH_EMULATE
void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "experts: " << what << ": " << cudaGetErrorString(error);
}

// bf16, rows of 64 columns land swizzled by 128 bytes; what lies outside reads as zeros
Map map_of(const void* data, const Box& b) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
          "cuTensorMapEncodeTiled");
    return (Encode)found;
  }();
  Map map;
  cuuint64_t size[5], pitch[4];
  cuuint32_t box[5], step[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < 5; i++) size[i] = b.size[i], box[i] = b.box[i];
  for (int i = 0; i < 4; i++) pitch[i] = b.pitch[i] * 2;
  const CUresult error = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, (void*)data, size, pitch, box, step,
                                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error) TVM_FFI_THROW(RuntimeError) << "experts: cuTensorMapEncodeTiled failed with " << (int)error;
  return map;
}

// A cluster has `cluster` CTAs. A kernel may take its place while the one before it runs
template <class Kernel, class Params>
void launch_early(Kernel kernel, const Params& p, int ctas, int threads, int cluster, size_t shared, DLDevice device) {
  cudaLaunchConfig_t config{};
  config.gridDim = ctas, config.blockDim = threads, config.dynamicSmemBytes = shared;
  config.stream = (cudaStream_t)TVMFFIEnvGetStream(device.device_type, device.device_id);
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {(unsigned)cluster, 1, 1};
  config.attrs = attributes, config.numAttrs = cluster > 1 ? 2 : 1;
  check(cudaLaunchKernelEx(&config, kernel, p), "launch");
}

void launch_sort(const SortParams& p, DLDevice device) {
  launch_early(sort_kernel, p, SORT_CTAS, SORT_THREADS, SORT_CTAS, sizeof(SortSmem), device);
}

template <bool GATE_UP>
void launch(const GroupedParams& p, int programs, DLDevice device) {
  constexpr int MAX_DEVICES = 64;
  static bool allowed[MAX_DEVICES] = {};
  const auto kernel = grouped_kernel<GATE_UP>;
  if (!allowed[device.device_id])
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(GroupedSmem)),
          "shared memory");
  allowed[device.device_id] = true;
  launch_early(kernel, p, programs, CONSUMERS + PRODUCERS, 1, sizeof(GroupedSmem), device);
}

void launch_gather(const GatherParams& p, DLDevice device) {
  launch_early(gather_kernel, p, p.slots * GATHER_BLOCKS, GATHER_WARPS * 32, 1, 0, device);
}
#endif

GroupedParams params(TensorView table, TensorView out, int64_t columns, int blocks) {
  GroupedParams p{};
  p.table = static_cast<const int*>(table.data_ptr());
  p.out = static_cast<uint16_t*>(out.data_ptr());
  p.slots = (int)table.size(1), p.blocks = blocks, p.columns = (int)columns, p.width = (int)out.size(1);
  return p;
}

// order and table as ops/experts/tiles.py has them
void grouped_sort(TensorView experts, int64_t first, int64_t count, int64_t tile, int64_t tail, TensorView order,
                  TensorView table) {
  SortParams p{};
  p.experts = static_cast<const int64_t*>(experts.data_ptr());
  p.order = static_cast<int*>(order.data_ptr()), p.table = static_cast<int*>(table.data_ptr());
  p.pairs = (int)order.size(0), p.first = (int)first, p.count = (int)count, p.slots = (int)table.size(1);
  p.tile = (int)tile, p.tail = (int)tail;
  launch_sort(p, experts.device());
}

int programs_for(const GroupedParams& p, int64_t most) {
  const int64_t pieces = (int64_t)p.slots * p.blocks;
  return (int)(pieces < most ? pieces : most);
}

// out[i] = row order[i] / top_k of x [T, W], for the pairs in the table's tiles
void grouped_gather(TensorView x, TensorView order, TensorView table, TensorView out, int64_t top_k) {
  GatherParams p{};
  p.x = static_cast<const uint16_t*>(x.data_ptr()), p.out = static_cast<uint16_t*>(out.data_ptr());
  p.order = static_cast<const int*>(order.data_ptr()), p.table = static_cast<const int*>(table.data_ptr());
  p.slots = (int)table.size(1), p.columns = (int)x.size(1), p.top_k = (int)top_k, p.x_stride = x.stride(0);
  launch_gather(p, x.device());
}

// a matrix [P, K] of sorted rows, 32 of them a box
Map sorted_rows(TensorView t) {
  const int64_t columns = t.size(1);
  return map_of(t.data_ptr(), {{columns, t.size(0), 1, 1, 1}, {columns, columns, columns, columns}, {BLOCK, 32, 1, 1, 1}});
}

// h[i] = act(gate, up) of row i of sorted x [P, W] against w13 [E, 2 * I, W], for the pairs in the table's tiles
void grouped_gate_up(TensorView x, TensorView w13, TensorView table, TensorView h, bool situ, double beta,
                     double linear_beta, int64_t programs) {
  const int64_t inner = w13.size(1) / 2, width = w13.size(2);
  GroupedParams p = params(table, h, width, (int)((2 * inner + ROWS - 1) / ROWS));
  p.rows = sorted_rows(x);
  p.activation.situ = situ;
  p.activation.beta = (float)beta, p.activation.inverse_beta = (float)(1 / beta);
  p.activation.linear_beta = (float)linear_beta;
  p.activation.inverse_linear_beta = linear_beta != 0 ? (float)(1 / linear_beta) : 0.f;
  // eight rows of gate, the same eight of up, and so on
  p.weights = map_of(w13.data_ptr(), {{width, 8, 2, inner / 8, w13.size(0)},
                                      {width, inner * width, 8 * width, 2 * inner * width},
                                      {BLOCK, 8, 2, ROWS / 16, 1}});
  launch<true>(p, programs_for(p, programs), x.device());
}

// out[order[i]] = w2 [E, W, I] times row i of h, for the pairs in the table's tiles
void grouped_down(TensorView h, TensorView w2, TensorView order, TensorView table, TensorView out, int64_t programs) {
  const int64_t width = w2.size(1), inner = w2.size(2);
  GroupedParams p = params(table, out, inner, (int)((width + ROWS - 1) / ROWS));
  p.order = static_cast<const int*>(order.data_ptr());
  p.weights = map_of(w2.data_ptr(), {{inner, width, w2.size(0), 1, 1},
                                     {inner, width * inner, inner, inner},
                                     {BLOCK, ROWS, 1, 1, 1}});
  p.rows = sorted_rows(h);
  launch<false>(p, programs_for(p, programs), h.device());
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(grouped_sort, grouped_sort);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(grouped_gather, grouped_gather);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(grouped_gate_up, grouped_gate_up);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(grouped_down, grouped_down);
