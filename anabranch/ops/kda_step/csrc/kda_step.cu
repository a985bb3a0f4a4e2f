// The kernels that are built, and their entry points.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include "kernel.cuh"

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

namespace {

#ifndef ANABRANCH_EMULATE
// Asked once for each device: a kernel's limit of dynamic shared memory belongs to a device.
template <class V>
cudaError_t allow_shared(int bytes) {
  static uint64_t asked = 0;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess || (asked >> device & 1)) return error;
  error = cudaFuncSetAttribute(kda_step_kernel<V>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) asked |= 1ull << device;
  return error;
}

template <class V>
int launch(const StepParams& p, bool chained, cudaStream_t stream) {
  const int bytes = sizeof(Smem) + V::TILE_BYTES;
  if (cudaError_t error = allow_shared<V>(bytes)) return (int)error;
  cudaLaunchConfig_t c{};
  c.gridDim = dim3(p.heads * V::SPLIT, p.requests), c.blockDim = V::THREADS, c.dynamicSmemBytes = bytes;
  c.stream = stream;
  cudaLaunchAttribute a[2];
  c.attrs = a;
  if (V::SPLIT > 1) {
    cudaLaunchAttribute& cluster = a[c.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = V::SPLIT, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  }
  if (chained) {
    cudaLaunchAttribute& pdl = a[c.numAttrs++];
    pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    pdl.val.programmaticStreamSerializationAllowed = 1;
  }
  return (int)cudaLaunchKernelEx(&c, kda_step_kernel<V>, p);
}
#endif

using F32 = float;
using BF16 = uint16_t;  // as bits

struct Built {
  const char* name;  // <state>_s<CTAs a head>_t<threads>x<resident>_<copies><rows held>[_fb][_many][_ef: what leaves L2 first]
  int (*launch)(const StepParams&, bool, cudaStream_t);
};

const Built kBuilt[] = {
    {"f32_s8_t128x8_reg", launch<Variant<F32, 8, 128, 8, 8, REGISTERS>>},
    {"f32_s1_t128x3_tma1_ef", launch<Variant<F32, 1, 128, 3, 1, BULK_IN, BOTH_FIRST>>},
    {"f32_s1_t128x3_bulk1_ef", launch<Variant<F32, 1, 128, 3, 1, BULK_BOTH, BOTH_FIRST>>},
    {"f32_s1_t256x3_tma1_efs", launch<Variant<F32, 1, 256, 3, 1, BULK_IN, STORES_FIRST>>},
    {"bf16_s8_t128x8_reg", launch<Variant<BF16, 8, 128, 8, 8, REGISTERS>>},
    {"bf16_s1_t128x3_tma2_ef", launch<Variant<BF16, 1, 128, 3, 2, BULK_IN, BOTH_FIRST>>},
    {"bf16_s1_t256x3_tma2", launch<Variant<BF16, 1, 256, 3, 2, BULK_IN>>},
    {"f32_s4_t256x2_reg_fb", launch<Variant<F32, 4, 256, 2, 8, REGISTERS, KEEP, true>>},
    {"f32_s1_t128x3_tma2_fb_ef", launch<Variant<F32, 1, 128, 3, 2, BULK_IN, BOTH_FIRST, true>>},
    {"f32_s1_t512x2_tma2_fb", launch<Variant<F32, 1, 512, 2, 2, BULK_IN, KEEP, true>>},
    {"bf16_s4_t256x2_reg_fb", launch<Variant<BF16, 4, 256, 2, 8, REGISTERS, KEEP, true>>},
    {"bf16_s1_t128x3_tma2_fb_ef", launch<Variant<BF16, 1, 128, 3, 2, BULK_IN, BOTH_FIRST, true>>},
    {"f32_s8_t128x4_reg_many", launch<Variant<F32, 8, 128, 4, 8, REGISTERS, KEEP, false, true>>},
    {"f32_s1_t128x3_tma1_many_ef", launch<Variant<F32, 1, 128, 3, 1, BULK_IN, BOTH_FIRST, false, true>>},
    {"bf16_s8_t128x4_reg_many", launch<Variant<BF16, 8, 128, 4, 8, REGISTERS, KEEP, false, true>>},
    {"bf16_s1_t128x3_tma2_many_ef", launch<Variant<BF16, 1, 128, 3, 2, BULK_IN, BOTH_FIRST, false, true>>},
    // not chosen: half tiles for 200 to 330 heads in a batch, and what lost to the variants above
    {"f32_s2_t128x6_tma1_ef", launch<Variant<F32, 2, 128, 6, 1, BULK_IN, BOTH_FIRST>>},
    {"f32_s2_t128x6_bulk1_ef", launch<Variant<F32, 2, 128, 6, 1, BULK_BOTH, BOTH_FIRST>>},
    {"f32_s4_t128x4_reg", launch<Variant<F32, 4, 128, 4, 8, REGISTERS>>},
    {"f32_s2_t256x3_reg", launch<Variant<F32, 2, 256, 3, 8, REGISTERS>>},
    {"f32_s1_t512x2_reg_ef", launch<Variant<F32, 1, 512, 2, 8, REGISTERS, BOTH_FIRST>>},
};

tvm::ffi::Array<tvm::ffi::String> variants() {
  tvm::ffi::Array<tvm::ffi::String> names;
  for (const Built& built : kBuilt) names.push_back(built.name);
  return names;
}

template <class T>
T* at(const TensorView& t) {
  return static_cast<T*>(t.data_ptr());
}

// Shapes, dtypes and strides are checked by the caller (cuda.py). `chained`: may start while the kernel before still
// runs, and waits for it; `early`: reads pools, slots and weights before it waits.
void run(int variant, TensorView qkv, TensorView conv, TensorView conv_weight, TensorView forget, Optional<TensorView> f_b,
         TensorView beta, TensorView gate, TensorView dt_bias, TensorView a_log, TensorView norm_weight, TensorView slots,
         Optional<TensorView> keep, TensorView state, TensorView out, double lower_bound, double eps, bool chained,
         bool early, int release, int prefetch) {
  StepParams p{};
  p.qkv = at<uint16_t>(qkv), p.forget = at<uint16_t>(forget), p.beta = at<uint16_t>(beta), p.gate = at<uint16_t>(gate);
  p.conv = at<uint16_t>(conv), p.state = state.data_ptr(), p.slots = at<int64_t>(slots), p.out = at<uint16_t>(out);
  p.conv_weight = at<float>(conv_weight), p.a_log = at<float>(a_log), p.dt_bias = at<float>(dt_bias);
  p.norm_weight = at<float>(norm_weight);
  if (f_b.has_value()) p.f_b = at<uint16_t>(f_b.value());
  if (keep.has_value()) {
    p.keep = at<int64_t>(keep.value());
    p.keep_stride = keep.value().stride(0), p.keep_step = keep.value().stride(1);
  }
  p.qkv_stride = qkv.stride(0), p.forget_stride = forget.stride(0), p.beta_stride = beta.stride(0);
  p.gate_stride = gate.stride(0), p.slot_stride = slots.stride(0);
  p.conv_pitch = conv.stride(0), p.state_pitch = state.stride(0);
  p.requests = (int)slots.size(0), p.tokens = (int)(qkv.size(0) / slots.size(0));
  p.heads = (int)state.size(1), p.pool = (int)state.size(0);
  p.lower_bound = (float)lower_bound, p.eps = (float)eps, p.early = early, p.release = release, p.prefetch = prefetch;
  const DLDevice device = qkv.device();
  const int error = kBuilt[variant].launch(p, chained, (cudaStream_t)TVMFFIEnvGetStream(device.device_type, device.device_id));
  if (error) TVM_FFI_THROW(RuntimeError) << "kda_step " << kBuilt[variant].name << ": CUDA error " << error;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(variants, variants);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);
