// Host side of skinny.cuh and low_rank.cuh: tensor maps, checks, launch. The variants built are listed in VARIANTS.
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include "low_rank.cuh"
#include "skinny.cuh"

using tvm::ffi::Optional;
using tvm::ffi::Shape;
using tvm::ffi::TensorView;

namespace {

constexpr int kMaxDevices = 64;

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << what << ": " << cudaGetErrorString(error);
}

// What configs.Config holds, in its order.
struct Config {
  int C, XR, T, WGS, KB, clusters, passes, ring, trigger, ahead, low_tiles, low_ahead;
  explicit Config(const Shape& s) {
    TVM_FFI_ICHECK_EQ(s.size(), sizeof(Config) / sizeof(int));
    for (size_t i = 0; i < s.size(); i++) reinterpret_cast<int*>(this)[i] = (int)s[i];
  }
};

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
Encode encoder() {
  static Encode found = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult q;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &q), "tensor map");
    return (Encode)f;
  }();
  return found;
}

// bf16 [rows, columns] of row pitch `pitch`, as [columns/64][rows][64]; rows past the end read as zeros
CUtensorMap map_of(const void* p, int64_t rows, int64_t columns, int64_t pitch, int box_rows, int blocks) {
  CUtensorMap map;
  cuuint64_t size[3] = {64, (cuuint64_t)rows, (cuuint64_t)columns / 64}, stride[2] = {(cuuint64_t)pitch * 2, 128};
  cuuint32_t box[3] = {64, (cuuint32_t)box_rows, (cuuint32_t)blocks}, step[3] = {1, 1, 1};
  // promotion to 256 bytes costs 0.4 to 0.9 us of a 12 us read
  const CUresult r = encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, (void*)p, size, stride, box, step,
                               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (r) TVM_FFI_THROW(RuntimeError) << "cuTensorMapEncodeTiled failed with " << (int)r;
  return map;
}

template <int C, int XR, int T, int WGS, int KB, bool LOW>
int shared_bytes(const Args& a) {
  const int stage = KB * (a.rows + T) * 128, box = C > 1 ? T * 256 * WGS : 0;
  const int used = kHeader + a.ring + box;
  // wgmma reads whole groups of 64 rows, past a short tile's end too
  const int reach = kHeader + a.ring / stage * KB * a.rows * 128 + WGS * 64 * 128;
  return used > reach ? used : reach;
}

// ask: launch nothing, only say how many clusters fit on the device
template <int C, int XR, int T, int WGS, int KB, bool LOW>
int launch(const Maps& maps, const Args& a, bool ask, int device, cudaStream_t stream) {
  using Kernel = Skinny<C, XR, T, WGS, KB, LOW>;
  const auto kernel = skinny_kernel<C, XR, T, WGS, KB, LOW>;
  const int bytes = shared_bytes<C, XR, T, WGS, KB, LOW>(a);
  static int allowed[kMaxDevices] = {};
  if (bytes > allowed[device]) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "shared memory");
    allowed[device] = bytes;
  }
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {C * XR, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = C * XR * a.clusters;
  config.blockDim = Kernel::kThreads;
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = ask ? 1 : 2;
  int clusters = 0;
  if (ask) check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), "occupancy");
  else check(cudaLaunchKernelEx(&config, kernel, maps, a), "launch");
  return clusters;
}

#define VARIANTS(V)                                                                                       \
  V(2, 1, 8, 1, 2, false) V(2, 1, 8, 1, 3, false) V(2, 1, 8, 1, 4, false) V(2, 1, 16, 1, 2, false)        \
  V(2, 1, 16, 1, 3, false) V(2, 1, 16, 1, 4, false) V(2, 1, 24, 1, 1, false) V(2, 1, 24, 1, 2, false)     \
  V(2, 1, 24, 1, 3, false) V(2, 1, 32, 1, 1, false) V(2, 1, 32, 1, 2, false) V(2, 1, 32, 1, 3, false)     \
  V(2, 1, 64, 1, 1, false) V(2, 1, 64, 1, 2, false) V(2, 1, 64, 1, 3, false) V(2, 1, 8, 2, 1, false)      \
  V(2, 1, 8, 2, 2, false) V(2, 1, 8, 2, 3, false) V(2, 1, 16, 2, 1, false) V(2, 1, 16, 2, 2, false)       \
  V(2, 1, 16, 2, 3, false) V(2, 1, 24, 2, 1, false) V(2, 1, 24, 2, 2, false) V(2, 1, 24, 2, 3, false)     \
  V(2, 1, 32, 2, 1, false) V(2, 1, 32, 2, 2, false) V(2, 1, 32, 2, 3, false) V(2, 1, 64, 2, 1, false)     \
  V(2, 1, 64, 2, 2, false) V(2, 2, 128, 1, 1, false) V(2, 2, 128, 2, 1, false) V(2, 4, 128, 1, 1, false)  \
  V(4, 1, 16, 1, 1, false) V(4, 1, 16, 1, 2, false) V(4, 1, 16, 1, 4, false) V(4, 1, 32, 1, 1, false)     \
  V(4, 1, 32, 1, 2, false) V(4, 1, 64, 1, 1, false) V(4, 1, 128, 1, 1, false) V(2, 1, 8, 1, 2, true)      \
  V(2, 1, 8, 1, 3, true) V(2, 1, 8, 2, 2, true) V(2, 1, 8, 2, 3, true) V(2, 1, 16, 1, 2, true)            \
  V(2, 1, 16, 1, 3, true) V(2, 1, 16, 2, 2, true) V(2, 1, 16, 2, 3, true) V(2, 1, 24, 1, 2, true)         \
  V(2, 1, 24, 1, 3, true) V(2, 1, 24, 2, 2, true) V(2, 1, 24, 2, 3, true) V(2, 1, 32, 1, 2, true)         \
  V(2, 1, 32, 1, 3, true) V(2, 1, 32, 2, 2, true) V(2, 1, 32, 2, 3, true) V(2, 1, 8, 1, 4, true)          \
  V(2, 1, 64, 1, 1, true) V(2, 1, 64, 2, 1, true) V(2, 1, 64, 2, 2, true)

int dispatch(const Config& c, bool low, const Maps& maps, const Args& a, bool ask, int device, cudaStream_t stream) {
#define V(C_, X_, T_, G_, B_, L_)                                                                 \
  if (c.C == C_ && c.XR == X_ && c.T == T_ && c.WGS == G_ && c.KB == B_ && low == L_)             \
    return launch<C_, X_, T_, G_, B_, L_>(maps, a, ask, device, stream);
  VARIANTS(V)
#undef V
  TVM_FFI_THROW(ValueError) << "skinny_gemm: no variant C=" << c.C << " XR=" << c.XR << " T=" << c.T << " WGS=" << c.WGS
                            << " KB=" << c.KB << (low ? " with a low-rank product" : "");
  return 0;
}

void demand(bool ok, const char* what, int64_t value, const char* accepted) {
  if (!ok) TVM_FFI_THROW(ValueError) << "skinny_gemm: " << what << " is " << value << "; accepted: " << accepted;
}

// the tallest of `tiles` tiles that share `groups` groups of 8 rows
int tallest(int64_t groups, int64_t tiles) { return (int)((groups + tiles - 1) / tiles) * 8; }

Args arguments(const TensorView& x, const TensorView& w, const TensorView& y, const Config& c) {
  const int64_t M = x.size(0), K = x.size(1), N = w.size(0), unit = kSegments * 64 * c.KB;
  demand(w.size(1) == K, "the columns of w", w.size(1), "those of x");
  demand(y.size(0) == M && y.size(1) == N, "the columns of y", y.size(1), "[rows of x, rows of w]");
  demand(M >= 1 && M <= c.T, "tokens", M, "1 to the token tile");
  demand(K % unit == 0, "K", K, "a multiple of 256 times the blocks of a stage");
  demand(N % 8 == 0, "N", N, "a multiple of 8");
  demand(x.stride(1) == 1 && x.stride(0) % 8 == 0, "the row pitch of x", x.stride(0), "a multiple of 8, inner stride 1");
  demand(w.stride(1) == 1 && w.stride(0) % 8 == 0, "the row pitch of w", w.stride(0), "a multiple of 8, inner stride 1");
  demand(y.stride(1) == 1 && y.stride(0) % 2 == 0, "the row pitch of y", y.stride(0), "even, inner stride 1");
  Args a = {};
  a.y = (__nv_bfloat16*)y.data_ptr();
  a.M = (int)M, a.N = (int)N, a.ldy = (int)y.stride(0);
  a.clusters = c.clusters, a.passes = c.passes, a.part = (int)K / 64 / c.C, a.ring = c.ring;
  a.trigger = c.trigger, a.ahead = c.ahead;
  return a;
}

void finish(const Config& c, int64_t groups, int64_t tiles, Args& a) {
  demand(groups >= tiles, "the tiles", tiles, "at most one a group of 8 rows");
  a.rows = tallest(groups, tiles);
  demand(a.rows <= c.WGS * 64, "the rows of a tile", a.rows, "64 a warpgroup");
  demand(c.ring >= 2 * c.KB * (a.rows + c.T) * 128, "the ring", c.ring, "room for two stages, as one is released late");
}

// How many clusters of this layout, made for N rows, the device holds at once.
int64_t clusters(int64_t N, Shape config, int64_t device) {
  const Config c(config);
  Args a = {};
  a.ring = c.ring, a.clusters = c.clusters;
  a.rows = tallest(N / 8, (int64_t)c.passes * c.clusters * c.XR);
  return dispatch(c, false, Maps{}, a, true, (int)device, nullptr);
}

// y = x w^T
void gemm(TensorView x, TensorView w, TensorView y, Shape config) {
  const Config c(config);
  Args a = arguments(x, w, y, c);
  finish(c, a.N / 8, (int64_t)c.passes * c.clusters * c.XR, a);
  Maps maps;
  maps.tall = map_of(w.data_ptr(), a.N, w.size(1), w.stride(0), a.rows, c.KB);
  maps.low = map_of(w.data_ptr(), a.N, w.size(1), w.stride(0), a.rows > 8 ? a.rows - 8 : 8, c.KB);
  maps.x = map_of(x.data_ptr(), a.M, w.size(1), x.stride(0), c.T / c.XR, c.XR > 1 ? 1 : c.KB);
  maps.tail_tall = maps.tall, maps.tail_low = maps.low;
  const DLDevice device = x.device();
  dispatch(c, false, maps, a, false, device.device_id,
           (cudaStream_t)TVMFFIEnvGetStream(device.device_type, device.device_id));
}

// y = x w^T and y2[i] = y[:, low_row0 + 128 i .. + 128] w2[i]^T in one launch; sync: two zeroed words of this layer's own
void gemm_low_rank(TensorView x, TensorView w, TensorView y, Shape config, int64_t low_row0, TensorView w2, TensorView y2,
                   TensorView sync) {
  const Config c(config);
  Args a = arguments(x, w, y, c);
  const int64_t sides = w2.size(0), rows = w2.size(1);
  demand(w2.size(2) == kRank && w2.stride(1) == kRank && w2.stride(0) == rows * kRank, "the rank", w2.size(2), "128, dense");
  demand(rows % kLowRows == 0, "the rows of w2", rows, "a multiple of 16");
  demand(y2.size(0) == sides && y2.size(1) == x.size(0) && y2.size(2) == rows, "the rows of y2", y2.size(2), "those of w2");
  demand(y2.stride(1) == rows && y2.stride(0) == rows * x.size(0), "the row pitch of y2", y2.stride(1), "dense");
  demand(low_row0 % 8 == 0 && low_row0 + sides * kRank <= a.N, "low_row0", low_row0, "a multiple of 8 before all sides");
  demand(c.low_tiles >= 1 && c.low_tiles <= c.clusters && c.XR == 1, "low_tiles", c.low_tiles, "1 to the clusters, XR 1");
  finish(c, low_row0 / 8, (int64_t)c.passes * c.clusters - c.low_tiles, a);
  a.low_row0 = (int)low_row0, a.low_tiles = c.low_tiles, a.low_ahead = c.low_ahead;
  a.low_tile_rows = tallest((a.N - low_row0) / 8, c.low_tiles);
  demand(a.low_tile_rows <= a.rows || c.passes == 1, "the rows of a tail tile", a.low_tile_rows, "those of a main tile");
  demand(a.low_tile_rows <= c.WGS * 64, "the rows of a tail tile", a.low_tile_rows, "64 a warpgroup");
  demand(c.ring >= 2 * c.KB * (a.low_tile_rows + c.T) * 128, "the ring", c.ring, "room for two stages of the tail");
  a.n2 = (int)(sides * rows), a.n2_group = (int)rows;
  a.w2 = (const __nv_bfloat16*)w2.data_ptr(), a.y2 = (__nv_bfloat16*)y2.data_ptr();
  a.sync = (unsigned*)sync.data_ptr();
  Maps maps;
  const auto weights = [&](int rows) { return map_of(w.data_ptr(), a.N, w.size(1), w.stride(0), rows > 0 ? rows : 8, c.KB); };
  maps.tall = weights(a.rows), maps.low = weights(a.rows - 8);
  maps.tail_tall = weights(a.low_tile_rows), maps.tail_low = weights(a.low_tile_rows - 8);
  maps.x = map_of(x.data_ptr(), a.M, w.size(1), x.stride(0), c.T, c.KB);
  const DLDevice device = x.device();
  dispatch(c, true, maps, a, false, device.device_id,
           (cudaStream_t)TVMFFIEnvGetStream(device.device_type, device.device_id));
}

// y[g] = x[g] w[g]^T with K = 128
void low_rank(TensorView x, TensorView w, TensorView y) {
  demand(x.size(2) == kRank && w.size(2) == kRank, "K", x.size(2), "128");
  demand(w.size(1) % 2 == 0, "N", w.size(1), "even");
  demand(x.stride(2) == 1 && x.stride(1) % 8 == 0 && x.stride(0) % 8 == 0, "the row pitch of x", x.stride(1),
         "a multiple of 8, inner stride 1");
  demand(w.stride(2) == 1 && w.stride(1) == kRank, "the row pitch of w", w.stride(1), "128");
  LowRank a = {(const __nv_bfloat16*)x.data_ptr(), (const __nv_bfloat16*)w.data_ptr(), (__nv_bfloat16*)y.data_ptr(),
               (int)x.size(1), (int)w.size(1), x.stride(0), x.stride(1), w.stride(0)};
  const DLDevice device = x.device();
  check(launch_low_rank(a, (int)x.size(0),
                        (cudaStream_t)TVMFFIEnvGetStream(device.device_type, device.device_id)), "launch");
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(clusters, clusters);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gemm, gemm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gemm_low_rank, gemm_low_rank);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(low_rank, low_rank);
