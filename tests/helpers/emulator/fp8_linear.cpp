// The block-FP8 product's CUDA kernel built for a CPU: the kernel and its entry point as they are, with this launch.
//
// Beyond hopper.h: what CTAs of a cluster send one another, boxes for several of them, named barriers.
#define ANABRANCH_EMULATE
#include <tvm/ffi/container/tensor.h>

#include <algorithm>
#include <map>

#include "hopper.h"

#define DEVICE inline
#define __shared__
#define __align__(n)
using std::max, std::min;
using __nv_bfloat16 = uint16_t;
constexpr uint64_t kEvictLast = 0;

// --- peers: an address of another CTA carries its rank ---
constexpr uint32_t PEER = 24;
inline int cluster_rank() { return me().cta; }
inline uint32_t peer_address(uint32_t address, uint32_t rank) { return address | (rank + 1) << PEER; }
inline char* anywhere(uint32_t address) { return shared_of((int)(address >> PEER) - 1) + (address & ((1u << PEER) - 1)); }
inline void barrier_arrive_peer(uint32_t bar) {
  Counted& b = *(Counted*)anywhere(bar);
  if (!b.pending) refuse("more arrivals than a barrier takes");
  b.pending--, settle(b);
}
inline void barrier_arrive_peer_relaxed(uint32_t bar) { barrier_arrive_peer(bar); }
inline void barrier_wait_cluster(uint32_t bar, uint32_t parity) { barrier_wait(bar, parity); }
inline void push(uint32_t to, float a, float b, float c, float d, uint32_t bar) {
  if (to & 15) refuse("16 bytes that are not on 16 bytes");
  float* const target = (float*)anywhere(to);
  Counted* const counter = (Counted*)anywhere(bar);
  under_way.push_back([=] { target[0] = a, target[1] = b, target[2] = c, target[3] = d, land(counter, 16); });
}
inline void push(uint32_t, float, float, uint32_t) { refuse("not used"); }
inline void tma_load_multicast(uint32_t to, const CUtensorMap* map, int row, int block, uint32_t bar, uint32_t peers,
                               uint64_t policy) {
  const int own = me().cta;
  for (int cta = 0; cta < (int)E.ctas.size(); cta++)
    if (peers >> cta & 1) me().cta = cta, tma_load(to, map, row, block, bar, policy);
  me().cta = own;
}
inline void tma_prefetch_map(const CUtensorMap*) {}
inline void tma_prefetch_l2(const CUtensorMap*, int, int) {}
inline void prefetch_l2(const void*) {}

struct Met { int arrived = 0; long generation = 0; };
inline std::map<std::pair<int, int>, Met> met;  // by CTA and barrier
inline void named_barrier(int id, int threads) {
  Met& m = met[{me().cta, id}];
  const long g = m.generation;
  if (++m.arrived == threads) m.arrived = 0, m.generation++;
  else while (m.generation == g) yield();
}

// --- numbers ---
template <class Value> Value __ldg(const Value* p) { return *p; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
template <int R> void pin(uint32_t (&)[R]) {}
inline uint16_t load_two(uint32_t address) { return *(const uint16_t*)shared_pointer(address); }
inline uint32_t widened_one(uint32_t code) {  // its fp16 twin has the bits one place to the right, with another bias
  const uint32_t half = (code & 0x80) << 8 | (code & 0x7f) << 7;
  const float value = (code & 0x7f) == 0x7f ? NAN : half_value((uint16_t)half) * 256.f;
  return f32_to_bf16(value);
}
inline uint32_t widened(uint16_t codes) { return widened_one(codes & 0xff) | widened_one(codes >> 8) << 16; }

// --- named by members of Skinny that are not compiled here ---
constexpr int kRank = 128, kLowRows = 16;
template <int T> struct Wgmma;
void low_rank_weights(const __nv_bfloat16*, int, uint32_t (&)[8][4]);
void low_rank_tile(const __nv_bfloat16*, const uint32_t (&)[8][4], float (&)[4]);
void low_rank_store(__nv_bfloat16*, int, int, int, int64_t, const float (&)[4]);
unsigned atomicAdd(unsigned*, unsigned);
void __threadfence();

#include "../../skinny_gemm/csrc/skinny.cuh"
#include "coded.cuh"

CUtensorMap map_of(const tvm::ffi::TensorView& t, int size, int box_rows, int blocks) {
  if ((uintptr_t)t.data_ptr() % 16 || t.stride(0) * size % 16 || box_rows > 256) refuse("a tensor that TMA cannot read");
  return {(const char*)t.data_ptr(), t.size(0), t.size(1) * size / 128, t.stride(0) * size, box_rows, blocks};
}
template <int XR, int T, int WGS, int KB> int launch(const Maps& maps, CodedArgs c, bool ask, DLDevice);

// one or two of each kind: building all of them takes too long
#define VARIANTS(V) \
  V(1, 8, 2, 2) V(1, 8, 4, 1) V(1, 16, 1, 1) V(1, 32, 4, 1) V(2, 64, 1, 1) V(2, 128, 1, 1) V(2, 128, 2, 1)
#include "fp8_linear.cu"

template <int XR, int T, int WGS, int KB> int launch(const Maps& maps, CodedArgs c, bool, DLDevice) {
  const int bytes = shared_bytes<XR, T, WGS, KB>(c), threads = Coded<XR, T, WGS, KB>::kThreads;
  if (bytes > 232448) refuse("more shared memory than a CTA may have");
  gridDim.x = 2 * XR * c.args.clusters;
  for (int cluster = 0; cluster < c.args.clusters; cluster++) {
    met.clear(), products.clear();
    emulate_cluster(2 * XR, threads, bytes, cluster, 0, [&] { coded_kernel<XR, T, WGS, KB>(maps, c); });
    if (!under_way.empty()) refuse("a cluster ended with data on the way");
  }
  return 0;
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(seed, [](int n) { emulate_seed = (unsigned)n; });
