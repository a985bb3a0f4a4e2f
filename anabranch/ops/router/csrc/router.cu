// Host side. Shapes, dtypes and strides are checked by the caller (cuda.py).
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include "router.cuh"

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

namespace {

#ifndef ANABRANCH_EMULATE
template <auto kernel>
void launch(const RouteParams& p, int blocks, int bytes, bool chained, DLDevice device) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks, config.blockDim = THREADS, config.dynamicSmemBytes = bytes;
  config.stream = (cudaStream_t)TVMFFIEnvGetStream(device.device_type, device.device_id);
  config.attrs = &early, config.numAttrs = chained;
  if (cudaError_t error = cudaLaunchKernelEx(&config, kernel, p))
    TVM_FFI_THROW(RuntimeError) << "router: launch: " << cudaGetErrorString(error);
}
#endif

int ceil_div(int a, int b) { return (a + b - 1) / b; }

template <int N, int ROWS, int TOKENS, int MOST>
void launch_as(RouteParams& p, bool chained, DLDevice device) {
  using Shared = RouteShared<N, ROWS, TOKENS, MOST>;
  p.workers = ceil_div(p.experts, ROWS);
  const int blocks = p.workers + ceil_div(p.tokens, Shared::CHOOSERS);
  launch<route_kernel<N, ROWS, TOKENS, MOST>>(p, blocks, sizeof(Shared), chained, device);
}

template <class T>
T* at(const TensorView& t) {
  return static_cast<T*>(t.data_ptr());
}
template <class T>
T* maybe(const Optional<TensorView>& t) {
  return t.has_value() ? at<T>(t.value()) : nullptr;
}

// `wide`: for up to 8192 columns and 1024 experts, else 4096 and 256.
void route(TensorView x, Optional<TensorView> update, Optional<TensorView> gain, double eps, TensorView w,
           TensorView bias, TensorView mail, Optional<TensorView> total, Optional<TensorView> y, TensorView weights,
           TensorView chosen, bool renormalize, double scaling, bool wide, bool chained) {
  RouteParams p{};
  p.x = at<uint16_t>(x), p.update = maybe<uint16_t>(update), p.gain = maybe<uint16_t>(gain), p.w = at<uint16_t>(w);
  p.bias = at<float>(bias), p.total = maybe<uint16_t>(total), p.y = maybe<uint16_t>(y), p.mail = at<uint64_t>(mail);
  p.weights = at<float>(weights), p.chosen = at<int64_t>(chosen);
  p.x_stride = x.stride(0), p.update_stride = update.has_value() ? update.value().stride(0) : 0;
  p.w_stride = w.stride(0), p.tokens = (int)x.size(0), p.width = (int)x.size(1), p.experts = (int)w.size(0);
  p.pitch = p.experts + p.experts % 2, p.top_k = (int)weights.size(1), p.renormalize = renormalize;
  p.eps = (float)eps, p.scaling = (float)scaling;
  if (wide) launch_as<4, 8, 1, 1024>(p, chained, x.device());
  else if (p.tokens == 1) launch_as<2, 2, 1, 256>(p, chained, x.device());
  else if (p.tokens == 2) launch_as<2, 2, 2, 256>(p, chained, x.device());
  else if (p.tokens <= 4) launch_as<2, 2, 4, 256>(p, chained, x.device());
  else launch_as<2, 2, 8, 256>(p, chained, x.device());
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(route, route);
