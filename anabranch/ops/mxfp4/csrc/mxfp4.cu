// Host side of few.cuh: tensor maps and launches. Shapes, dtypes and strides are checked by the caller (cuda.py).
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include "few.cuh"

#include "../../csrc/launch.cuh"

using tvm::ffi::TensorView;

namespace {

#ifndef ANABRANCH_EMULATE
int multiprocessors(int device) {
  static int count[MAX_DEVICES] = {};
  if (!count[device]) check(cudaDeviceGetAttribute(&count[device], cudaDevAttrMultiProcessorCount, device), "device");
  return count[device];
}
#endif

// A ring as deep as shared memory allows, which CTAS programs of a multiprocessor share
template <bool GATE_UP, int NT>
void run(FewParams& p, TensorView packed, DLDevice device) {
  using Kernel = Few<GATE_UP, NT>;
  const int budget = 233472 / CTAS - 1024, steps = ((p.columns + 255) / 256 + Kernel::BOXES - 1) / Kernel::BOXES;
  for (p.stages = MOST_STAGES; p.stages > 1; p.stages--) {
    p.slots_of_scales = (p.stages + steps - 1) / steps + 1;
    if (Kernel::shared_bytes(p.columns, p.stages, p.slots_of_scales) <= budget) break;
  }
  const int64_t rows = packed.size(1), pitch = p.columns / 4;
  p.blocks = (int)(rows / Kernel::ROWS);
  if constexpr (GATE_UP)
    p.codes = map_of(packed.data_ptr(), CU_TENSOR_MAP_DATA_TYPE_UINT16,
                     {{pitch, 8, 2, rows / 16, packed.size(0)},
                      {pitch, rows / 2 * pitch, 8 * pitch, rows * pitch},
                      {64, 8, 2, Kernel::ROWS / 16, 1}});
  else
    p.codes = map_of(packed.data_ptr(), CU_TENSOR_MAP_DATA_TYPE_UINT16,
                     {{pitch, rows, packed.size(0), 1, 1},
                      {pitch, rows * pitch, pitch, pitch},
                      {64, Kernel::ROWS, 1, 1, 1}});
  const int pieces = p.slots * p.blocks, most = multiprocessors(device.device_id) * CTAS;
  const int bytes = Kernel::shared_bytes(p.columns, p.stages, p.slots_of_scales);
  launch_early<few_kernel<GATE_UP, NT>>(p, pieces < most ? pieces : most, Kernel::THREADS, bytes, device);
}

FewParams params(TensorView scale, TensorView x, TensorView order, TensorView table, TensorView out) {
  FewParams p{};
  p.scale = static_cast<const uint8_t*>(scale.data_ptr());
  p.x = static_cast<const uint16_t*>(x.data_ptr());
  p.order = static_cast<const int*>(order.data_ptr()), p.table = static_cast<const int*>(table.data_ptr());
  p.out = static_cast<uint16_t*>(out.data_ptr());
  p.slots = (int)table.size(1), p.columns = (int)x.size(1), p.width = (int)out.size(1), p.x_stride = x.stride(0);
  return p;
}

template <bool GATE_UP>
void launch(int64_t tile, FewParams& p, TensorView packed, DLDevice device) {
  tile == 8 ? run<GATE_UP, 1>(p, packed, device) : run<GATE_UP, 2>(p, packed, device);
}

// h[i] = act(gate, up) of the arranged row order[i] / top_k of x [T, W], for the pairs in tiles of `tile`
void few_gate_up(TensorView x, TensorView packed, TensorView scale, TensorView order, TensorView table, TensorView h,
                 int64_t top_k, bool situ, double beta, double linear_beta, int64_t tile) {
  FewParams p = params(scale, x, order, table, h);
  p.top_k = (int)top_k;
  p.activation = activation_of(situ, beta, linear_beta);
  launch<true>(tile, p, packed, x.device());
}

// out[order[i]] = down times row i of the arranged h
void few_down(TensorView h, TensorView packed, TensorView scale, TensorView order, TensorView table, TensorView out,
              int64_t tile) {
  FewParams p = params(scale, h, order, table, out);
  launch<false>(tile, p, packed, h.device());
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(few_gate_up, few_gate_up);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(few_down, few_down);
