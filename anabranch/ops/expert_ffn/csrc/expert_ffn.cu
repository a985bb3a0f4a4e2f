// Host side of both launches. Shapes, dtypes and strides are checked by the caller (gemv.py).
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include "down.cuh"
#include "gate_up.cuh"

using tvm::ffi::Optional;
using tvm::ffi::Shape;
using tvm::ffi::TensorView;

// What gemv.py hands to both launches, in its order.
struct Call {
  int first, count, blocks, chained, warps, down_warps, down_blocks;
  explicit Call(const Shape& s) {
    TVM_FFI_ICHECK_EQ(s.size(), sizeof(Call) / sizeof(int));
    for (size_t i = 0; i < s.size(); i++) reinterpret_cast<int*>(this)[i] = (int)s[i];
  }
};

namespace {

#ifndef ANABRANCH_EMULATE
constexpr int MAX_DEVICES = 64;
// Percent of 228 KB: 64 KB hold a block of each launch, and the rest is cache, through which all weights pass.
constexpr int SHARED_PERCENT = 28;

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "expert_ffn: " << what << ": " << cudaGetErrorString(error);
}

template <auto kernel, class Params>
void launch(const Params& p, int blocks, int bytes, bool chained, DLDevice device) {
  static bool known[MAX_DEVICES] = {};
  if (!known[device.device_id]) {  // asked once for each device
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, SHARED_PERCENT), "carveout");
    known[device.device_id] = true;
  }
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks, config.blockDim = p.warps * 32, config.dynamicSmemBytes = bytes;
  config.stream = (cudaStream_t)TVMFFIEnvGetStream(device.device_type, device.device_id);
  config.attrs = &early, config.numAttrs = chained;
  check(cudaLaunchKernelEx(&config, kernel, p), "launch");
}
#endif

int ceil_div(int a, int b) { return (a + b - 1) / b; }

Routing routing_of(const TensorView& experts, const Call& call) {
  return {static_cast<const int64_t*>(experts.data_ptr()), (int)experts.size(1), call.first, call.count};
}

template <class T>
T* at(const TensorView& t) {
  return static_cast<T*>(t.data_ptr());
}

const uint16_t* maybe(const Optional<TensorView>& t) { return t.has_value() ? at<uint16_t>(t.value()) : nullptr; }

template <int N, bool WHOLE>
void launch_gate_up(const GateUpParams& p, const Call& call, DLDevice device) {
  const int bytes = ceil_div(p.width, N * CHUNK) * N * CHUNK * 2;
  launch<gate_up_kernel<N, WHOLE>>(p, call.blocks, bytes > PAIR_SHARED ? bytes : PAIR_SHARED, call.chained, device);
}

void gate_up(TensorView x, TensorView w, TensorView experts, Optional<TensorView> shared, TensorView h, Shape shape,
             bool situ, double beta, double linear_beta) {
  const Call call(shape);
  GateUpParams p{};
  p.routing = routing_of(experts, call), p.x = at<uint16_t>(x), p.w = at<uint16_t>(w), p.shared = maybe(shared);
  p.h = at<uint16_t>(h), p.width = (int)x.size(1), p.inner = (int)w.size(1) / 2;
  p.shared_inner = shared.has_value() ? (int)shared.value().size(0) / 2 : 0;
  p.pitch = (int)h.size(1), p.warps = call.warps;
  p.situ = situ, p.beta = (float)beta, p.linear_beta = (float)linear_beta;
  if (p.width <= 9 * CHUNK) launch_gate_up<9, true>(p, call, x.device());
  else launch_gate_up<7, false>(p, call, x.device());
}

void down(TensorView h, TensorView w, TensorView experts, TensorView weights, Optional<TensorView> shared,
          TensorView y, Shape shape) {
  const Call call(shape);
  DownParams p{};
  p.routing = routing_of(experts, call), p.weights = at<float>(weights), p.h = at<uint16_t>(h), p.w = at<uint16_t>(w);
  p.shared = maybe(shared), p.y = at<uint16_t>(y), p.width = (int)y.size(1), p.inner = (int)w.size(2);
  p.shared_inner = shared.has_value() ? (int)shared.value().size(1) : 0;
  p.pitch = (int)h.size(1), p.warps = call.down_warps;
  const int most = p.shared_inner > p.inner ? p.shared_inner : p.inner, rows = ceil_div(p.routing.top_k + 1, ROWS) * ROWS;
  const int bytes = rows * ceil_div(most, ROW_CHUNKS * CHUNK) * ROW_CHUNKS * CHUNK * 2;
  launch<down_kernel>(p, call.down_blocks, bytes, call.chained, y.device());
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gate_up, gate_up);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(down, down);
