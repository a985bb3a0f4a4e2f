// A block that owns ROWS experts: residual add, norm, logits. See router.cuh.
#pragma once
#include "sums.cuh"

struct RouteParams {
  const uint16_t *x, *update;  // [tokens, width]; no update: x is the sum
  const uint16_t* gain;        // [width] of the norm; none: x is normed already
  const uint16_t* w;           // [experts, width]
  const float* bias;           // [experts]
  uint16_t *total, *y;         // [tokens, width], dense, where there is an update and a norm
  uint64_t* mail;              // [tokens, pitch], zero: the bits of a score, and above them the order of its biased one
  float* weights;              // [tokens, top_k]
  int64_t* chosen;             // [tokens, top_k]
  int64_t x_stride, update_stride, w_stride;
  int tokens, width, experts, pitch, top_k, workers, renormalize;
  float eps, scaling;
};

constexpr uint32_t NOBODY = 1;  // the order of what is no expert, below all others

// The order of fp32 in whole numbers above NOBODY; NaN comes last, whatever its sign.
DEV uint32_t order(float x) {
  const uint32_t bits = __float_as_uint(x);
  return x != x ? ~0u : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
DEV float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

// N: pieces of 8 columns of a thread, 2048 columns apart, as in ops/norm. TOKENS: worked on at once.
template <int N, int ROWS, int TOKENS>
struct Worker {
  static constexpr int SUMS = TOKENS * ROWS;
  struct Shared {
    float squares[TOKENS][WARPS];
    float dots[2][SUMS][WARPS];  // by the parity of the pass
  };
  const RouteParams& p;
  Shared& s;
  const int first_row, row;  // of the block, and the one whose sums this thread completes
  uint4 w[ROWS][N], gain[N], v[TOKENS][N];
  float bias = 0.f;

  DEV Worker(const RouteParams& p, Shared& s)
      : p(p), s(s), first_row((int)blockIdx.x * ROWS), row(first_row + (int)threadIdx.x % ROWS) {}

  DEV int column(int piece) const { return (piece * THREADS + (int)threadIdx.x) * 8; }
  DEV bool has(int piece) const { return (piece * THREADS + warp_id() * 32) * 8 < p.width; }  // the whole warp
  DEV bool wanted(int piece) const { return column(piece) < p.width; }

  // Before the kernel in front has ended.
  DEV void load_weights() {
#pragma unroll
    for (int i = 0; i < N; i++) {
#pragma unroll
      for (int r = 0; r < ROWS; r++)
        w[r][i] = stream(p.w + (first_row + r) * p.w_stride + column(i), wanted(i) && first_row + r < p.experts);
      if (p.gain != nullptr) gain[i] = stream(p.gain + column(i), wanted(i));
    }
    if (threadIdx.x < SUMS && row < p.experts) bias = load_weight(p.bias + row);
  }

  DEV void load_tokens(int first) {
    const bool adds = p.update != nullptr;
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      const int64_t token = first + t;
      uint4 more[N];
#pragma unroll
      for (int i = 0; i < N; i++) {
        const bool in = token < p.tokens && wanted(i);
        v[t][i] = in ? load_written(p.x + token * p.x_stride + column(i)) : make_uint4(0, 0, 0, 0);
        more[i] = in && adds ? load_written(p.update + token * p.update_stride + column(i)) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < N; i++)
        if (adds && has(i)) v[t][i] = add_pairs(v[t][i], more[i]);
    }
    if (adds) keep(p.total, first);
  }

  // The block whose turn a row is stores it.
  DEV bool keeps(int token) const {
    return token < p.tokens && (token == (int)blockIdx.x || (blockIdx.x == 0 && token >= p.workers));
  }
  DEV void keep(uint16_t* rows, int first) const {
#pragma unroll
    for (int t = 0; t < TOKENS; t++)
      if (keeps(first + t))
#pragma unroll
        for (int i = 0; i < N; i++)
          if (wanted(i)) store_written(rows + (int64_t)(first + t) * p.width + column(i), v[t][i]);
  }

  DEV void norm(int first) {
    float sum[TOKENS] = {};
#pragma unroll
    for (int i = 0; i < N; i++)
      if (has(i))
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
          sum[t] = i ? add_squares<false>(sum[t], v[t][i]) : add_squares<true>(0.f, v[t][i]);
    share(sum, s.squares);
    __syncthreads();
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      const float scale = reciprocal_root(divide(sum_of_warps(s.squares[t]), (float)p.width) + p.eps);
#pragma unroll
      for (int i = 0; i < N; i++)
        if (has(i)) v[t][i] = scaled(v[t][i], scale, gain[i]);
    }
    keep(p.y, first);
  }

  DEV void multiply(int first, int parity) {
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
      for (int r = 0; r < ROWS; r++) pin(w[r][i]);  // or the compiler would keep them widened from pass to pass
    float sum[SUMS] = {};
#pragma unroll
    for (int i = 0; i < N; i++)
      if (has(i))
#pragma unroll
        for (int k = 0; k < SUMS; k++) sum[k] = dot(sum[k], w[k % ROWS][i], v[k / ROWS][i]);
    share(sum, s.dots[parity]);
    __syncthreads();
    const int token = first + (int)threadIdx.x / ROWS;
    if (threadIdx.x < SUMS && token < p.tokens && row < p.pitch) {
      const float score = sigmoid(sum_of_warps(s.dots[parity][threadIdx.x]));
      const uint64_t place = row < p.experts ? order(score + bias) : NOBODY;
      send_mail(p.mail + token * p.pitch + row, place << 32 | __float_as_uint(score));
    }
  }

  DEV void run() {
    load_weights();
    for (int first = 0, pass = 0; first < p.tokens; first += TOKENS, pass++) {
      if (first == 0) wait_for_previous(), launch_dependents();  // in here, so that addresses are ready before it
      load_tokens(first);
      if (p.gain != nullptr) norm(first);
      multiply(first, pass & 1);
    }
  }
};
