// Host side of both launches. Shapes, dtypes and strides are checked by the caller (stream.py).
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

// What stream.py hands to both launches, in its order.
struct Call {
  int first, count, slots, ctas, chained, ahead, trigger, most, batch, wide_bytes, narrow_bytes;
  explicit Call(const Shape& s) {
    TVM_FFI_ICHECK_EQ(s.size(), sizeof(Call) / sizeof(int));
    for (size_t i = 0; i < s.size(); i++) reinterpret_cast<int*>(this)[i] = (int)s[i];
  }
};

namespace {

#ifndef ANABRANCH_EMULATE
constexpr int MAX_DEVICES = 64, MOST_SHARED = 232448;

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "expert_ffn: " << what << ": " << cudaGetErrorString(error);
}

template <class Params>
void launch(void (*kernel)(Params), bool (&allowed)[MAX_DEVICES], const Params& p, const Call& call, int bytes,
            DLDevice device) {
  if (!allowed[device.device_id]) {  // asked once for each device
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, MOST_SHARED), "shared memory");
    // or the second launch would find no room beside the first
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
          "carveout");
    allowed[device.device_id] = true;
  }
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = call.ctas, config.blockDim = THREADS, config.dynamicSmemBytes = bytes;
  config.stream = (cudaStream_t)TVMFFIEnvGetStream(device.device_type, device.device_id);
  config.attrs = &early, config.numAttrs = call.chained;
  check(cudaLaunchKernelEx(&config, kernel, p), "launch");
}

template <int N>
void launch_gate_up(const GateUpParams& p, const Call& call, DLDevice device) {
  static bool allowed[MAX_DEVICES] = {};
  launch(gate_up_kernel<N>, allowed, p, call, call.wide_bytes, device);
}

template <int N, int HELD>
void launch_down(const DownParams& p, const Call& call, DLDevice device) {
  static bool allowed[MAX_DEVICES] = {};
  launch(down_kernel<N, HELD>, allowed, p, call, call.narrow_bytes, device);
}
#endif

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// A block of `bytes`: stages of at most `most` rows, or fewer where they would be less than three. `copies`: rows of
// weights for each row counted.
Layout layout_of(int bytes, int batch, int most, int row_bytes, int copies, int tokens) {
  Layout l = {};
  l.batch = batch, l.lanes = tokens <= 2 ? 2 : tokens <= 4 ? 4 : 8;
  for (l.most = most; l.most > 0; l.most--) {
    l.slot_bytes = l.most * copies * row_bytes;
    const int room = bytes - (int)sizeof(Smem) - 2 * l.batch * WARPS * copies * l.most * l.lanes * 4;
    l.stages = room < 0 ? 0 : room / l.slot_bytes;
    if (l.stages > MAX_STAGES) l.stages = MAX_STAGES;
    if (l.stages >= 3) return l;
  }
  TVM_FFI_THROW(ValueError) << "expert_ffn: a block of " << bytes << " bytes holds no three rows of "
                            << copies * row_bytes << " bytes; accepted: shorter rows, or more shared memory";
  return l;
}

int steps_of(int columns) { return ceil_div(ceil_div(columns, 32), WARPS); }

Routing routing_of(const TensorView& experts, const Call& call) {
  return {static_cast<const int64_t*>(experts.data_ptr()), (int)experts.size(0), (int)experts.size(1), call.first,
          call.count};
}

template <class T>
T* at(const TensorView& t) {
  return static_cast<T*>(t.data_ptr());
}

const uint16_t* maybe(const Optional<TensorView>& t) { return t.has_value() ? at<uint16_t>(t.value()) : nullptr; }

// h [slots + 1, tokens, pitch]; how many stages the ring has
int64_t gate_up(TensorView x, TensorView w, TensorView experts, Optional<TensorView> shared, TensorView h, Shape shape,
                bool situ, double beta, double linear_beta) {
  const Call call(shape);
  GateUpParams p{};
  p.routing = routing_of(experts, call), p.x = at<uint16_t>(x), p.w = at<uint16_t>(w), p.shared = maybe(shared);
  p.h = at<uint16_t>(h), p.x_stride = x.stride(0), p.width = (int)x.size(1), p.inner = (int)w.size(1) / 2;
  p.shared_inner = shared.has_value() ? (int)shared.value().size(0) / 2 : 0;
  p.pitch = (int)h.size(2), p.slots = call.slots, p.ahead = call.ahead, p.trigger = call.trigger;
  p.situ = situ, p.beta = (float)beta, p.linear_beta = (float)linear_beta;
  p.layout = layout_of(call.wide_bytes, call.batch, call.most, p.width * 2, 2, p.routing.tokens);
  const int steps = steps_of(p.width);
  if (steps <= 2) launch_gate_up<2>(p, call, x.device());
  else if (steps <= 9) launch_gate_up<9>(p, call, x.device());
  else if (steps <= 14) launch_gate_up<14>(p, call, x.device());
  else TVM_FFI_THROW(ValueError) << "expert_ffn: width is " << p.width << "; accepted: up to 3584";
  return p.layout.stages;
}

template <int N>
void launch_down_of(const DownParams& p, const Call& call, int held, DLDevice device) {
  if (held <= 1) launch_down<N, 1>(p, call, device);
  else if (held <= 4) launch_down<N, 4>(p, call, device);
  else TVM_FFI_THROW(ValueError) << "expert_ffn: " << call.ctas << " blocks are too few for a width of " << p.width;
}

int64_t down(TensorView h, TensorView w, TensorView experts, TensorView weights, Optional<TensorView> shared,
             TensorView y, Shape shape) {
  const Call call(shape);
  DownParams p{};
  p.routing = routing_of(experts, call), p.weights = at<float>(weights), p.h = at<uint16_t>(h), p.w = at<uint16_t>(w);
  p.shared = maybe(shared), p.y = at<uint16_t>(y), p.y_stride = y.stride(0), p.width = (int)y.size(1);
  p.inner = (int)w.size(2), p.shared_inner = shared.has_value() ? (int)shared.value().size(1) : 0;
  p.pitch = (int)h.size(2), p.slots = call.slots;
  const int columns = p.shared_inner > p.inner ? p.shared_inner : p.inner, rows = ceil_div(p.width, call.ctas);
  // a CTA's rows in equal pieces of at most a tile
  const int most = ceil_div(rows, ceil_div(rows, 16));
  p.layout = layout_of(call.narrow_bytes, call.batch, most, columns * 2, 1, p.routing.tokens);
  const int steps = steps_of(columns), held = ceil_div(rows * p.layout.lanes, CONSUMERS);
  if (steps <= 2) launch_down_of<2>(p, call, held, y.device());
  else if (steps <= 4) launch_down_of<4>(p, call, held, y.device());
  else if (steps <= 12) launch_down_of<12>(p, call, held, y.device());
  else TVM_FFI_THROW(ValueError) << "expert_ffn: inner width is " << columns << "; accepted: up to 3072";
  return p.layout.stages;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gate_up, gate_up);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(down, down);
