// Host side of coded.cuh: tensor maps, checks, launch. The variants built are listed in VARIANTS.
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include "coded.cuh"

using tvm::ffi::Shape;
using tvm::ffi::TensorView;

namespace {

constexpr int kMaxDevices = 64;

void demand(bool ok, const char* what, int64_t value, const char* accepted) {
  if (!ok) TVM_FFI_THROW(ValueError) << "fp8_linear: " << what << " is " << value << "; accepted: " << accepted;
}

// What ops/fp8_linear/layout.py holds, in its order.
struct Layout {
  int XR, T, WGS, KB, clusters, passes, ring, trigger, ahead;
  explicit Layout(const Shape& s) {
    TVM_FFI_ICHECK_EQ(s.size(), sizeof(Layout) / sizeof(int));
    for (size_t i = 0; i < s.size(); i++) reinterpret_cast<int*>(this)[i] = (int)s[i];
  }
  int groups() const { return clusters * XR * passes; }
};

#ifndef ANABRANCH_EMULATE
void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "fp8_linear: " << what << ": " << cudaGetErrorString(error);
}

// [rows, columns] of row pitch `pitch`, as [columns / width][rows][width] where `width` elements are 128 bytes: boxes
// of `blocks` such slices land swizzled by 128 bytes; rows past the end read as zeros
CUtensorMap map_of(const TensorView& t, int size, int box_rows, int blocks) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result), "map");
    return (Encode)found;
  }();
  CUtensorMap map;
  const cuuint32_t width = 128 / size, box[3] = {width, (cuuint32_t)box_rows, (cuuint32_t)blocks}, step[3] = {1, 1, 1};
  const cuuint64_t extent[3] = {width, (cuuint64_t)t.size(0), (cuuint64_t)t.size(1) / width};
  const cuuint64_t pitch[2] = {(cuuint64_t)t.stride(0) * size, 128};
  const CUresult error =
      encode(&map, size == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, t.data_ptr(), extent,
             pitch, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error) TVM_FFI_THROW(RuntimeError) << "fp8_linear: cuTensorMapEncodeTiled failed with " << (int)error;
  return map;
}

#endif

// Bytes of shared memory; also sets where the scales lie. Rows past a short tile's end are read, too.
template <int XR, int T, int WGS, int KB>
int shared_bytes(CodedArgs& c) {
  using Kernel = Coded<XR, T, WGS, KB>;
  const Args& a = c.args;
  const int stage = KB * (a.rows + 2 * T) * 128, box = T * 256 * WGS;
  c.scales = kHeader + a.ring + box;
  const int used = c.scales + a.passes * Kernel::kScaleRows * a.part * 4;
  const int reach = kHeader + a.ring / stage * KB * a.rows * 128 + WGS * 64 * 128;
  return used > reach ? used : reach;
}

#ifndef ANABRANCH_EMULATE
// ask: launch nothing, only say how many clusters fit on the device
template <int XR, int T, int WGS, int KB>
int launch(const Maps& maps, CodedArgs c, bool ask, DLDevice on) {
  const int device = on.device_id;
  const auto kernel = coded_kernel<XR, T, WGS, KB>;
  const int bytes = shared_bytes<XR, T, WGS, KB>(c);
  static int allowed[kMaxDevices] = {};
  if (bytes > allowed[device]) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "shared memory");
    allowed[device] = bytes;
  }
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {2 * XR, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = 2 * XR * c.args.clusters;
  config.blockDim = Coded<XR, T, WGS, KB>::kThreads;
  config.dynamicSmemBytes = bytes;
  if (!ask) config.stream = (cudaStream_t)TVMFFIEnvGetStream(on.device_type, device);
  config.attrs = attributes;
  config.numAttrs = ask ? 1 : 2;
  int clusters = 0;
  if (ask) check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), "occupancy");
  else check(cudaLaunchKernelEx(&config, kernel, maps, c), "launch");
  return clusters;
}
#endif

#ifndef VARIANTS  // XR, T, WGS, KB
#define VARIANTS(V)                                                                                       \
  V(1, 8, 1, 1) V(1, 8, 2, 1) V(1, 8, 2, 2) V(1, 8, 4, 1) V(1, 8, 4, 2) V(1, 16, 1, 1) V(1, 16, 2, 1)     \
  V(1, 16, 2, 2) V(1, 16, 4, 1) V(1, 32, 1, 1) V(1, 32, 2, 1) V(1, 32, 2, 2) V(1, 32, 4, 1) V(1, 64, 1, 1) \
  V(1, 64, 2, 1) V(2, 64, 1, 1) V(2, 64, 2, 1) V(2, 128, 1, 1) V(2, 128, 2, 1)
#endif

int dispatch(const Layout& l, const Maps& maps, const CodedArgs& c, bool ask, DLDevice device) {
#define V(X_, T_, G_, B_)                                          \
  if (l.XR == X_ && l.T == T_ && l.WGS == G_ && l.KB == B_)        \
    return launch<X_, T_, G_, B_>(maps, c, ask, device);
  VARIANTS(V)
#undef V
  TVM_FFI_THROW(ValueError) << "fp8_linear: no variant XR=" << l.XR << " T=" << l.T << " WGS=" << l.WGS << " KB=" << l.KB;
  return 0;
}

// the tallest tile where `rows` rows go out in groups of 8
int tallest(int64_t rows, int64_t tiles) { return (int)((rows / 8 + tiles - 1) / tiles) * 8; }

CodedArgs arguments(const Layout& l, int64_t rows, int64_t columns) {
  demand(rows % 8 == 0 && rows / 8 >= l.groups(), "the rows of codes", rows, "a multiple of 8, a group of 8 a tile");
  demand(columns % 256 == 0, "the columns of codes", columns, "a multiple of 256");
  CodedArgs c = {};
  Args& a = c.args;
  a.N = (int)rows, a.clusters = l.clusters, a.passes = l.passes, a.part = (int)columns / 256;
  a.rows = tallest(rows, l.groups());
  a.ring = l.ring, a.trigger = l.trigger, a.ahead = l.ahead;
  demand(l.KB == 1 || a.part % (2 * l.KB) == 0, "KB", l.KB, "1 where a part of K is no whole number of stages");
  demand(a.rows <= l.WGS * 64, "the rows of a tile", a.rows, "64 a warpgroup");
  demand(l.ring >= 2 * l.KB * (a.rows + 2 * l.T) * 128, "the ring", l.ring, "room for two stages");
  return c;
}

// How many clusters of this layout, made for such a weight, the device holds at once.
int64_t clusters(int64_t rows, int64_t columns, Shape layout, int64_t device) {
  const Layout l(layout);
  return dispatch(l, Maps{}, arguments(l, rows, columns), true, DLDevice{kDLCUDA, (int)device});
}

// y = x w^T, where w is a code times the scale of its block
void multiply(TensorView x, TensorView codes, TensorView scale, TensorView y, Shape layout) {
  const Layout l(layout);
  const int64_t M = x.size(0), K = x.size(1), N = codes.size(0);
  CodedArgs c = arguments(l, N, K);
  demand(codes.size(1) == K, "the columns of codes", codes.size(1), "those of x");
  demand(scale.size(0) * 128 >= N, "the rows of scale", scale.size(0), "one for each 128 rows of codes");
  demand(scale.size(1) * 128 == K && scale.stride(1) == 1, "the columns of scale", scale.size(1), "a 128th, inner stride 1");
  demand(y.size(0) == M && y.size(1) == N, "the columns of y", y.size(1), "[rows of x, rows of codes]");
  demand(M >= 1 && M <= l.T, "tokens", M, "1 to the token tile");
  demand(x.stride(1) == 1 && x.stride(0) % 8 == 0, "the row pitch of x", x.stride(0), "a multiple of 8, inner stride 1");
  demand(codes.stride(1) == 1 && codes.stride(0) % 16 == 0, "the row pitch of codes", codes.stride(0),
         "a multiple of 16, inner stride 1");
  demand(y.stride(1) == 1 && y.stride(0) % 2 == 0, "the row pitch of y", y.stride(0), "even, inner stride 1");
  Args& a = c.args;
  a.y = (__nv_bfloat16*)y.data_ptr();
  a.M = (int)M, a.ldy = (int)y.stride(0);
  c.scale = (const float*)scale.data_ptr();
  c.scale_pitch = (int)scale.stride(0), c.scale_rows = (int)scale.size(0);
  Maps maps;
  maps.tall = map_of(codes, 1, a.rows, l.KB);
  maps.low = map_of(codes, 1, a.rows > 8 ? a.rows - 8 : 8, l.KB);
  maps.x = map_of(x, 2, l.T / l.XR, l.XR > 1 ? 1 : 2 * l.KB);
  maps.tail_tall = maps.tall, maps.tail_low = maps.low;
  dispatch(l, maps, c, false, x.device());
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(clusters, clusters);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(multiply, multiply);
