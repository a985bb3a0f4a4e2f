// First launch: h = act(gate row x, up row x) for every local choice of the token and for the shared expert.
#pragma once
#include "gemv.cuh"

constexpr int PAIR_REGISTERS = 96;        // with those of down: both launches fit a multiprocessor side by side
constexpr int PAIR_SHARED = 34 * 1024;  // at least, or two blocks of this launch could meet on one multiprocessor

struct GateUpParams {
  Routing routing;
  const uint16_t *x, *w, *shared;  // w [E, 2 * inner, width], shared [2 * shared_inner, width] or null
  uint16_t* h;                     // [top_k + 1, pitch]: by choice; the shared expert last
  int width, inner, shared_inner, pitch, warps;
  int situ;
  float beta, linear_beta;         // linear_beta 0: no cap
};

DEV float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }

DEV uint16_t activate(const GateUpParams& p, float gate, float up) {
  gate = round_bf16(gate), up = round_bf16(up);
  if (!p.situ) return f32_to_bf16(round_bf16(gate * sigmoid(gate)) * up);
  if (p.linear_beta != 0.f) up = p.linear_beta * tanhf(up / p.linear_beta);
  return f32_to_bf16(p.beta * tanhf(gate / p.beta) * sigmoid(gate) * up);
}

// The warp's row pairs in passes of N chunks: of one line of all pairs, the shared expert's first, every step-th.
template <int N>
struct PairWalk {
  const GateUpParams& p;
  int flat, to = 0;  // to: where the result belongs in h
  Part gate;                   // and of up as much, `apart` elements further
  int apart = 0;
  DEV PairWalk(const GateUpParams& p) : p(p), flat(threadIdx.x / 32 * gridDim.x + blockIdx.x) {}
  DEV bool done() const { return flat >= p.shared_inner + p.routing.top_k * p.inner; }

  // `chosen`: local_choice of each lane. Choices that are not local are passed over.
  DEV void find(int chosen) {
    for (; !done(); flat += gridDim.x * p.warps) {
      if (flat < p.shared_inner) return place(p.shared, flat, p.shared_inner, p.routing.top_k);
      const int choice = (flat - p.shared_inner) / p.inner, row = flat - p.shared_inner - choice * p.inner;
      const int expert = shuffle(chosen, choice);
      if (expert >= 0) return place(p.w + (int64_t)expert * 2 * p.inner * p.width, row, p.inner, choice);
    }
    gate.left = 0;
  }
  DEV void place(const uint16_t* w, int row, int inner, int choice) {
    gate = {w + (int64_t)row * p.width + lane_id() * 8, p.width - lane_id() * 8};
    apart = inner * p.width, to = choice * p.pitch + row;
  }
  DEV Part up() const { return {gate.at + apart, gate.left}; }
  DEV void next(int chosen, bool row_ends) {
    if (row_ends) {
      flat += gridDim.x * p.warps, find(chosen);
    } else {
      gate.at += N * CHUNK, gate.left -= N * CHUNK;
    }
  }
};

// N: chunks of gate and of up in registers at once. WHOLE: they are a row, else it takes several passes.
template <int N, bool WHOLE>
__global__ void __maxnreg__(PAIR_REGISTERS) gate_up_kernel(const __grid_constant__ GateUpParams p) {
  uint4* x = &smem_base<uint4>();  // [passes * N][32], zeros behind the width
  const int passes = WHOLE ? 1 : (p.width + N * CHUNK - 1) / (N * CHUNK);
  PairWalk<N> walk(p);
  uint4 gate[N], up[N];
  int chosen = -1;
  // rows of the shared expert are asked for while the router still runs
  if (walk.flat >= p.shared_inner) wait_for_previous(), chosen = local_choice(p.routing);
  walk.find(chosen);
#pragma unroll
  for (int i = 0; i < N; i++) gate[i] = walk.gate.ask(i), up[i] = walk.up().ask(i);
  wait_for_previous();
  launch_dependents();  // not before the wait: the second launch reads the router's choice at once
  chosen = local_choice(p.routing);
  for (int i = threadIdx.x; i < passes * N * 32; i += p.warps * 32)
    x[i] = i * 8 < p.width ? load_written(p.x + i * 8) : make_uint4(0, 0, 0, 0);
  __syncthreads();
  while (!walk.done()) {
    const int to = walk.to;
    float g = 0.f, u = 0.f;
    for (int pass = 0; pass < passes; pass++) {
      walk.next(chosen, pass + 1 == passes);
#pragma unroll
      for (int i = 0; i < N; i++) {
        const uint4 part = x[(pass * N + i) * 32 + lane_id()];
        g = dot(g, gate[i], part), u = dot(u, up[i], part);
        gate[i] = walk.gate.ask(i), up[i] = walk.up().ask(i);
      }
    }
    g = warp_sum(g), u = warp_sum(u);
    if (lane_id() == 0) store_result(p.h + to, activate(p, g, u));
  }
}
