// The kernels that are built, and their entry points.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include "attend.cuh"
#include "leave.cuh"

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

namespace {

#ifndef ANABRANCH_EMULATE
template <class Params>
int start(void (*kernel)(Params), const Params& p, dim3 grid, int threads, int bytes, bool chained, DLDevice device) {
  cudaLaunchAttribute pdl;
  pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  pdl.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t c{};
  c.gridDim = grid, c.blockDim = threads, c.dynamicSmemBytes = bytes;
  c.stream = (cudaStream_t)TVMFFIEnvGetStream(device.device_type, device.device_id);
  c.attrs = &pdl, c.numAttrs = chained ? 1 : 0;
  return (int)cudaLaunchKernelEx(&c, kernel, p);
}

template <int MT>
int launch(const AttendParams& p, int programs, bool chained, DLDevice device) {
  constexpr int bytes = sizeof(AttendSmem<MT>), heads = 16 * MT;
  static uint64_t asked = 0;  // a kernel's limit of shared memory belongs to a device
  if (!(asked >> device.device_id & 1)) {
    const auto limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
    if (const cudaError_t error = cudaFuncSetAttribute(mla_attend_kernel<MT>, limit, bytes)) return (int)error;
    asked |= 1ull << device.device_id;
  }
  const dim3 grid(programs, (p.heads + heads - 1) / heads);
  return start(mla_attend_kernel<MT>, p, grid, THREADS, bytes, chained, device);
}

int launch_leave(const LeaveParams& p, bool chained, DLDevice device) {
  if (!p.weight) {
    const dim3 grid((p.heads + MERGE_HEADS - 1) / MERGE_HEADS, p.requests);
    return start(mla_merge_kernel, p, grid, LEAVE_THREADS, 0, chained, device);
  }
  const dim3 grid((p.width + COLUMNS - 1) / COLUMNS, p.heads, p.requests);
  return start(mla_leave_kernel, p, grid, LEAVE_THREADS, sizeof(LeaveSmem), chained, device);
}
#endif

template <class T>
T* at(const TensorView& t) {
  return static_cast<T*>(t.data_ptr());
}

// Shapes, dtypes and strides are checked by the caller (attend.py). `chained`: may start while the kernel before still
// runs, and waits for it; `early`: reads lengths, table and rows but the newest before it waits.
void attend(TensorView absorbed, TensorView q, TensorView pages, TensorView table, TensorView totals, TensorView acc,
            TensorView stats, int programs, int least, double scale, bool chained, bool early) {
  AttendParams p{};
  p.absorbed = at<uint16_t>(absorbed), p.q = at<uint16_t>(q), p.pages = at<uint16_t>(pages);
  p.table = at<int64_t>(table), p.totals = at<int64_t>(totals), p.acc = at<float>(acc), p.stats = at<float>(stats);
  p.q_token = q.stride(0), p.q_head = q.stride(1), p.table_stride = table.stride(0), p.entry_stride = table.stride(1);
  p.total_stride = totals.stride(0), p.page_pitch = pages.stride(0);
  p.requests = (int)q.size(0), p.heads = (int)q.size(1), p.nope = (int)q.size(2) - ROPE, p.least = least;
  p.scale = (float)scale, p.early = early;
  const auto run = p.heads <= 16 ? launch<1> : launch<2>;
  if (const int error = run(p, programs, chained, q.device()))
    TVM_FFI_THROW(RuntimeError) << "mla_attend: CUDA error " << error;
}

// `weight` is [H, V, RANK], a slice of rows, `gate` [B, H * V] and `y` [B, H, V]; without weight `y` is [B, H, RANK].
void leave(TensorView acc, TensorView stats, TensorView totals, Optional<TensorView> weight, Optional<TensorView> gate,
           TensorView y, int programs, int least, bool chained, bool early) {
  LeaveParams p{};
  p.acc = at<float>(acc), p.stats = at<float>(stats), p.totals = at<int64_t>(totals);
  if (weight.has_value()) p.weight = at<uint16_t>(weight.value()), p.w_head = weight.value().stride(0);
  if (gate.has_value()) p.gate = at<uint16_t>(gate.value()), p.gate_token = gate.value().stride(0);
  p.y = at<uint16_t>(y), p.total_stride = totals.stride(0);
  p.requests = (int)y.size(0), p.heads = (int)y.size(1), p.width = (int)y.size(2);
  p.programs = programs, p.least = least, p.early = early;
  if (const int error = launch_leave(p, chained, y.device()))
    TVM_FFI_THROW(RuntimeError) << "mla_leave: CUDA error " << error;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend, attend);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(leave, leave);
