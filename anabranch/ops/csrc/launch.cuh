// What the host sides of operations share: errors, tensor maps of five dimensions, launches that begin early.
// All of it is internal to a library, as libraries loaded beside each other remember their own kernels.
#pragma once
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

struct Box {  // of a tensor of 16-bit values, innermost dimension first
  int64_t size[5], pitch[4];  // pitches of dimensions 1 to 4, in values
  int box[5];
};

#ifdef ANABRANCH_EMULATE
#include "launch.h"
#else
#include <cuda.h>
#include <cuda_runtime.h>

namespace {

constexpr int MAX_DEVICES = 64;
constexpr int PLAIN_SHARED = 48 * 1024, MOST_SHARED = 232448;  // bytes of a CTA: without asking, and on Hopper at most

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << what << ": " << cudaGetErrorString(error);
}

// Rows of 64 values land swizzled by 128 bytes; what lies outside reads as zeros
inline CUtensorMap map_of(const void* data, CUtensorMapDataType type, const Box& b) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
          "cuTensorMapEncodeTiled");
    return (Encode)found;
  }();
  CUtensorMap map;
  cuuint64_t size[5], pitch[4];
  cuuint32_t box[5], step[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < 5; i++) size[i] = b.size[i], box[i] = b.box[i];
  for (int i = 0; i < 4; i++) pitch[i] = b.pitch[i] * 2;
  // promotion to 256 bytes costs 1 to 6 % of a stream that is read once
  const CUresult error = encode(&map, type, 5, (void*)data, size, pitch, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error) TVM_FFI_THROW(RuntimeError) << "cuTensorMapEncodeTiled failed with " << (int)error;
  return map;
}

// KERNEL(p) by `ctas` CTAs in clusters of `cluster`. It may take its place while the kernel before it runs
template <auto KERNEL, class Params>
void launch_early(const Params& p, int ctas, int threads, size_t shared, DLDevice device, int cluster = 1) {
  static bool allowed[MAX_DEVICES] = {};  // of this kernel
  if (shared > PLAIN_SHARED && !allowed[device.device_id]) {
    check(cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, MOST_SHARED), "shared memory");
    allowed[device.device_id] = true;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = ctas, config.blockDim = threads, config.dynamicSmemBytes = shared;
  config.stream = (cudaStream_t)TVMFFIEnvGetStream(device.device_type, device.device_id);
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {(unsigned)cluster, 1, 1};
  config.attrs = attributes, config.numAttrs = cluster > 1 ? 2 : 1;
  check(cudaLaunchKernelEx(&config, KERNEL, p), "launch");
}

}  // namespace
#endif
