// Second launch: a warp owns an output column, that is one row of every wanted down matrix, so the weighted sum never
// leaves it. Its first weights are asked for while the first launch still runs.
#pragma once
#include "gemv.cuh"

constexpr int ROW_CHUNKS = 4, ROWS = 2;  // of a row, and rows of different experts, in registers at once
constexpr int DOWN_REGISTERS = 64;
constexpr int PREFETCHED = 2;  // experts behind the first ROWS whose row goes to L2 while the first launch runs

struct DownParams {
  Routing routing;
  const float* weights;            // [top_k]
  const uint16_t *h, *w, *shared;  // h: see gate_up.cuh; w [E, width, inner], shared [width, shared_inner] or null
  uint16_t* y;                     // [width]
  int width, inner, shared_inner, pitch, warps;
};

// Lane r has the r-th local expert in ascending order.
struct Ranked {
  int found = 0, expert = 0, choice = 0;
  float weight = 0.f;
  DEV Ranked(const Routing& r, const float* weights) {
    const int mine = local_choice(r);
    const float value = lane_id() < r.top_k ? load_early(weights + lane_id()) : 0.f;
    int rank = 0;
    for (int i = 0; i < r.top_k; i++) {
      const int other = shuffle(mine, i);
      found += other >= 0;
      rank += other >= 0 && (other < mine || (other == mine && i < lane_id()));
    }
    if (mine < 0) rank = -1;
    for (int i = 0; i < r.top_k; i++) {
      const int at = shuffle(rank, i), e = shuffle(mine, i);
      const float v = shuffle(value, i);
      if (at == lane_id()) expert = e, choice = i, weight = v;
    }
  }
};

// The warp's row of every expert that is wanted.
struct Column {
  const DownParams& p;
  const Ranked& ranked;
  const int row;

  // Of the index-th expert; behind the last comes the shared one, then nothing.
  DEV int columns(int index) const {
    return index < ranked.found ? p.inner : index == ranked.found && p.shared != nullptr ? p.shared_inner : 0;
  }
  DEV Part part(int index, int column) const {
    const int expert = shuffle(ranked.expert, index);
    const uint16_t* at = index < ranked.found ? p.w + ((int64_t)expert * p.width + row) * p.inner
                                              : p.shared + (int64_t)row * p.shared_inner;
    return {at + column, row < p.width ? columns(index) - column : 0};
  }
};

// Hidden rows in the order of the experts: [padded][piece / 32][32], zeros behind their columns.
DEV void load_hidden(uint4* h, const DownParams& p, const Ranked& ranked, const Column& mine, int padded, int piece) {
  for (int i = threadIdx.x; i < padded * piece; i += p.warps * 32) {
    const int index = i / piece, column = (i - index * piece) * 8, choice = shuffle(ranked.choice, index);
    const uint16_t* from = p.h + (index < ranked.found ? choice : p.routing.top_k) * p.pitch + column;
    h[i] = column < mine.columns(index) ? load_written(from) : make_uint4(0, 0, 0, 0);
  }
}

__global__ void __maxnreg__(DOWN_REGISTERS) down_kernel(const __grid_constant__ DownParams p) {
  constexpr int N = ROW_CHUNKS;
  uint4* h = &smem_base<uint4>();
  const int most = p.shared_inner > p.inner ? p.shared_inner : p.inner;
  const int passes = (most + N * CHUNK - 1) / (N * CHUNK);
  const Ranked ranked(p.routing, p.weights);  // chosen before the first launch let this one start
  const int padded = (ranked.found + ROWS) / ROWS * ROWS;
  const Column mine{p, ranked, (int)(threadIdx.x / 32 * gridDim.x + blockIdx.x)};
  uint4 w[ROWS][N];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const Part part = mine.part(r, lane_id() * 8);
#pragma unroll
    for (int i = 0; i < N; i++) w[r][i] = part.ask(i);
  }
  for (int n = ROWS; n < ROWS + PREFETCHED; n++) {
    const Part part = mine.part(n, lane_id() * LINE);
    if (part.left > 0) prefetch_l2(part.at);
  }
  wait_for_previous();
  launch_dependents();
  load_hidden(h, p, ranked, mine, padded, passes * N * 32);
  __syncthreads();
  float sum = 0.f, own = 0.f;
  for (int base = 0; base < padded; base += ROWS) {
    float part[ROWS] = {};
    for (int pass = 0; pass < passes; pass++) {
      const bool last = pass + 1 == passes;
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        const uint4* hidden = h + ((base + r) * passes + pass) * N * 32 + lane_id();
        const Part later = mine.part(base + r + (last ? ROWS : 0), (last ? 0 : pass + 1) * N * CHUNK + lane_id() * 8);
#pragma unroll
        for (int i = 0; i < N; i++) part[r] = dot(part[r], w[r][i], hidden[i * 32]), w[r][i] = later.ask(i);
      }
    }
    // a product and a sum round apart, as in ops/expert_sum
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const float value = round_bf16(warp_sum(part[r])), weight = shuffle(ranked.weight, base + r);
      if (base + r < ranked.found) sum = __fadd_rn(sum, __fmul_rn(value, weight));
      else if (base + r == ranked.found) own = value;
    }
  }
  if (lane_id() == 0 && mine.row < p.width) store_result(p.y + mine.row, f32_to_bf16(round_bf16(sum) + own));
}
