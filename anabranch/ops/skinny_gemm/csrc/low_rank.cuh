// y[g] = x[g] w[g]^T for K = 128: the second GEMM of a low-rank pair (f_b, or f_b and g_b together).
// A warp takes 16 rows of w and 8 tokens: mma.sync in ascending K, the same steps wherever the tile is computed.
#pragma once
#include "ptx.cuh"

constexpr int kRank = 128, kLowRows = 16;

// Fragments of 16 rows of w, those past `rows` repeated; readable before the previous kernel has ended.
DEVICE void low_rank_weights(const __nv_bfloat16* w, int rows, uint32_t (&fragments)[8][4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
  for (int k = 0; k < 8; k++)
#pragma unroll
    for (int j = 0; j < 4; j++)
      fragments[k][j] = __ldg(reinterpret_cast<const unsigned*>(
          w + (int64_t)min(g + (j & 1) * 8, rows - 1) * kRank + k * 16 + (j >> 1) * 8 + q * 2));
}

DEVICE void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d = 16 rows x 8 tokens; `x` is this lane's token (lane / 4), read past L1 as another block has written it.
DEVICE void low_rank_tile(const __nv_bfloat16* x, const uint32_t (&w)[8][4], float (&d)[4]) {
  uint32_t b[8][2];
#pragma unroll
  for (int k = 0; k < 8; k++)
#pragma unroll
    for (int j = 0; j < 2; j++)
      b[k][j] = __ldcg(reinterpret_cast<const unsigned*>(x + k * 16 + j * 8 + threadIdx.x % 4 * 2));
  d[0] = d[1] = d[2] = d[3] = 0.f;
#pragma unroll
  for (int k = 0; k < 8; k++) mma_16x8x16(d, w[k], b[k][0], b[k][1]);
}

// Stores the tile at y[t0 .., 0 ..], two rows a lane.
DEVICE void low_rank_store(__nv_bfloat16* y, int t0, int tokens, int rows, int64_t pitch, const float (&d)[4]) {
  const int lane = threadIdx.x % 32, t = t0 + lane / 4;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const uint32_t pair = transpose_8x8(pack_bf16(d[2 * h], d[2 * h + 1]));
    const int r = h * 8 + lane % 4 * 2;
    if (t < tokens && r < rows) *reinterpret_cast<uint32_t*>(y + t * pitch + r) = pair;
  }
}

struct LowRank {
  const __nv_bfloat16 *x, *w;
  __nv_bfloat16* y;  // [groups, tokens, rows], dense
  int tokens, rows;
  int64_t x_group, x_row, w_group;
};

// The kernel that does nothing else: a block of 4 warps takes 64 rows and up to 32 tokens, through shared memory.
constexpr int kBlockRows = 64, kBlockTokens = 32, kPitch = kRank * 2 + 16;  // bytes; no two rows of 8 share a bank

DEVICE uint4 load_16(const __nv_bfloat16* p) { return *reinterpret_cast<const uint4*>(p); }

__global__ void __launch_bounds__(128) low_rank_kernel(const LowRank a) {
  __shared__ __align__(16) char ws[kBlockRows * kPitch], xs[kBlockTokens * kPitch];
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, group = blockIdx.z;
  const int row0 = blockIdx.x * kBlockRows, t0 = blockIdx.y * kBlockTokens, tokens = min(kBlockTokens, a.tokens - t0);
  const __nv_bfloat16* w = a.w + group * a.w_group;
#pragma unroll
  for (int i = tid; i < kBlockRows * 16; i += 128)  // 16 bytes a thread
    *reinterpret_cast<uint4*>(ws + i / 16 * kPitch + i % 16 * 16) =
        load_16(w + (int64_t)min(row0 + i / 16, a.rows - 1) * kRank + i % 16 * 8);
  wait_for_previous();
  launch_dependents();
  const __nv_bfloat16* x = a.x + group * a.x_group;
  for (int i = tid; i < (tokens + 7) / 8 * 8 * 16; i += 128)
    *reinterpret_cast<uint4*>(xs + i / 16 * kPitch + i % 16 * 16) =
        load_16(x + (int64_t)(t0 + min(i / 16, tokens - 1)) * a.x_row + i % 16 * 8);
  __syncthreads();
  uint32_t f[8][4];
  const uint32_t at = shared_address(ws) + (warp * 16 + lane % 16) * kPitch + lane / 16 * 16;
#pragma unroll
  for (int k = 0; k < 8; k++) ldmatrix_x4(f[k], at + k * 32);
  const int rows = min(kLowRows, a.rows - row0 - warp * kLowRows);
  __nv_bfloat16* y = a.y + (int64_t)group * a.tokens * a.rows + row0 + warp * kLowRows;
  for (int n = 0; n < tokens; n += 8) {
    const uint32_t from = shared_address(xs) + (n + lane % 8) * kPitch + lane / 8 * 16;
    float d[4] = {};
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
      uint32_t b[4];
      ldmatrix_x4(b, from + k * 32);
      mma_16x8x16(d, f[k], b[0], b[1]);
      mma_16x8x16(d, f[k + 1], b[2], b[3]);
    }
    low_rank_store(y, t0 + n, a.tokens, rows, a.rows, d);
  }
}

inline cudaError_t launch_low_rank(const LowRank& a, int groups, cudaStream_t stream) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  const int tiles = (a.rows + kBlockRows - 1) / kBlockRows;
  config.gridDim = dim3(tiles, (a.tokens + kBlockTokens - 1) / kBlockTokens, groups);
  config.blockDim = 128;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, low_rank_kernel, a);
}
