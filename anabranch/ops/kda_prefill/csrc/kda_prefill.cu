// Entry points of both kernels.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include "chain.cuh"
#include "prepare.cuh"

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

namespace {

#ifndef ANABRANCH_EMULATE
constexpr int MAX_DEVICES = 64;

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "kda_prefill: " << what << ": " << cudaGetErrorString(error);
}

// Asked once for each device: a kernel's limit of dynamic shared memory belongs to a device.
template <class Kernel>
void allow_shared(Kernel kernel, int bytes, int device, bool (&allowed)[MAX_DEVICES]) {
  if (allowed[device]) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "shared memory");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "carveout");
  allowed[device] = true;
}

cudaStream_t stream_of(DLDevice device) {
  return (cudaStream_t)TVMFFIEnvGetStream(device.device_type, device.device_id);
}

void launch_prepare(const PrepareParams& p, int heads, int chunks, DLDevice device) {
  static bool allowed[MAX_DEVICES] = {};
  allow_shared(kda_prepare_kernel, sizeof(PrepareSmem), device.device_id, allowed);
  kda_prepare_kernel<<<dim3(heads, chunks), GROUPS * 32, sizeof(PrepareSmem), stream_of(device)>>>(p);
  check(cudaGetLastError(), "prepare");
}

// bf16 [rows, blocks * 64] of row pitch `pitch` elements, as [blocks][rows][64]; rows past the end read as zeros
CUtensorMap map_of(const void* data, int64_t rows, int64_t blocks, int64_t pitch, int box_rows, int box_blocks) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
          "cuTensorMapEncodeTiled");
    return (Encode)found;
  }();
  CUtensorMap map;
  cuuint64_t size[3] = {64, (cuuint64_t)rows, (cuuint64_t)blocks}, stride[2] = {(cuuint64_t)pitch * 2, 128};
  cuuint32_t box[3] = {64, (cuuint32_t)box_rows, (cuuint32_t)box_blocks}, step[3] = {1, 1, 1};
  const CUresult error = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, (void*)data, size, stride, box, step,
                                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error) TVM_FFI_THROW(RuntimeError) << "kda_prefill: cuTensorMapEncodeTiled failed with " << (int)error;
  return map;
}

void launch_chain(const ChainParams& p, const ChainMaps& maps, int heads, int segments, DLDevice device) {
  static bool allowed[MAX_DEVICES] = {};
  allow_shared(kda_chain_kernel, sizeof(ChainSmem), device.device_id, allowed);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(2, heads, segments), config.blockDim = Chain::THREADS;
  config.dynamicSmemBytes = sizeof(ChainSmem), config.stream = stream_of(device);
  cudaLaunchAttribute early{};  // reads states while the first kernel ends
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early, config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kda_chain_kernel, p, maps), "chain");
}
#endif

template <class T>
T* at(const TensorView& t) {
  return static_cast<T*>(t.data_ptr());
}

// Shapes, dtypes and strides are checked by the caller (cuda.py). tiles [chunks, heads, PLACE], scales likewise.
void prepare(TensorView q, TensorView k, TensorView f, TensorView b, TensorView dt_bias, TensorView a_log,
             TensorView offsets, TensorView tiles, TensorView scales, double bound) {
  PrepareParams p{};
  p.q = at<uint16_t>(q), p.k = at<uint16_t>(k), p.f = at<uint16_t>(f), p.b = at<uint16_t>(b);
  p.dt_bias = at<float>(dt_bias), p.a_log = at<float>(a_log), p.offsets = at<int64_t>(offsets);
  p.tiles = at<uint16_t>(tiles), p.scales = at<float>(scales);
  p.q_stride = q.stride(0), p.k_stride = k.stride(0), p.f_stride = f.stride(0), p.b_stride = b.stride(0);
  p.segments = (int)offsets.size(0) - 1, p.bound = (float)bound;
  launch_prepare(p, (int)tiles.size(1), (int)tiles.size(0), q.device());
}

void chain(TensorView tiles, TensorView scales, TensorView v, TensorView o, TensorView offsets, TensorView slots,
           Optional<TensorView> saves, TensorView state) {
  ChainParams p{};
  p.scales = at<float>(scales), p.offsets = at<int64_t>(offsets), p.slots = at<int64_t>(slots);
  if (saves.has_value()) p.saves = at<int64_t>(saves.value()), p.save_stride = saves.value().stride(0);
  p.state = state.data_ptr(), p.out = at<uint16_t>(o), p.bf16_state = state.dtype().bits == 16;
  p.o_stride = o.stride(0), p.slot_stride = slots.stride(0), p.state_pitch = state.stride(0);
  const int heads = (int)tiles.size(1), segments = (int)slots.size(0);
  const int64_t places = tiles.size(0) * heads;
  ChainMaps maps;
  maps.wide = map_of(tiles.data_ptr(), places * (PLACE / 128), 2, 128, 3 * CHUNK, 2);
  maps.square = map_of(tiles.data_ptr(), places * (PLACE / 64), 1, 64, 2 * CHUNK, 1);
  maps.v = map_of(v.data_ptr(), v.size(0), 2 * heads, v.stride(0), CHUNK, 1);
  launch_chain(p, maps, heads, segments, v.device());
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepare, prepare);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(chain, chain);
