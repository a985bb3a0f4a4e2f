// Host side of stream.cuh: tensor maps and launches. Shapes, dtypes and strides are checked by the caller (stream.py).
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include "stream.cuh"

#include "../../csrc/launch.cuh"

using tvm::ffi::TensorView;

namespace {

constexpr int ROWS = Stream<true>::ROWS, BLOCK = Stream<true>::BLOCK;  // the same in both

StreamParams params(TensorView x, int64_t rows, TensorView order, TensorView table, TensorView out) {
  StreamParams p{};
  p.x = static_cast<const uint16_t*>(x.data_ptr()), p.out = static_cast<uint16_t*>(out.data_ptr());
  p.order = static_cast<const int*>(order.data_ptr()), p.table = static_cast<const int*>(table.data_ptr());
  p.slots = (int)table.size(1), p.blocks = (int)((rows + ROWS - 1) / ROWS);
  p.columns = (int)x.size(1), p.width = (int)out.size(1), p.x_stride = x.stride(0);
  return p;
}

template <bool GATE_UP>
void launch(const StreamParams& p, int64_t programs, DLDevice device) {
  using Kernel = Stream<GATE_UP>;
  const int64_t pieces = (int64_t)p.slots * p.blocks;
  const int few = (int)(pieces < programs ? pieces : programs);
  launch_early<stream_kernel<GATE_UP>>(p, few, Kernel::THREADS, sizeof(typename Kernel::Smem), device);
}

// h[i] = act(gate, up) of row order[i] / top_k of x [T, W] against w13 [E, 2 * I, W], for the pairs in tiles
void stream_gate_up(TensorView x, TensorView w13, TensorView order, TensorView table, TensorView h, int64_t top_k,
                    bool situ, double beta, double linear_beta, int64_t programs) {
  const int64_t inner = w13.size(1) / 2, width = w13.size(2);
  StreamParams p = params(x, 2 * inner, order, table, h);
  p.top_k = (int)top_k;
  p.activation = activation_of(situ, beta, linear_beta);
  // eight rows of gate, the same eight of up, and so on
  p.weights = map_of(w13.data_ptr(), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                     {{width, 8, 2, inner / 8, w13.size(0)},
                      {width, inner * width, 8 * width, 2 * inner * width},
                      {BLOCK, 8, 2, ROWS / 16, 1}});
  launch<true>(p, programs, x.device());
}

// out[order[i]] = w2 [E, W, I] times row i of h, for the pairs in tiles
void stream_down(TensorView h, TensorView w2, TensorView order, TensorView table, TensorView out, int64_t programs) {
  const int64_t width = w2.size(1), inner = w2.size(2);
  StreamParams p = params(h, width, order, table, out);
  p.weights = map_of(w2.data_ptr(), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                     {{inner, width, w2.size(0), 1, 1},
                      {inner, width * inner, inner, inner},
                      {BLOCK, ROWS, 1, 1, 1}});
  launch<false>(p, programs, h.device());
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(stream_gate_up, stream_gate_up);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(stream_down, stream_down);
