// First launch: h = act(gate rows x, up rows x) of every wanted expert and of the shared one.
#pragma once
#include "stream.cuh"

struct GateUpParams {
  Routing routing;
  Layout layout;
  const uint16_t *x, *w, *shared;  // w [E, 2 * inner, width], shared [2 * shared_inner, width] or null
  uint16_t* h;                     // [slots + 1, tokens, pitch]: by place in the list of experts; the shared one last
  int64_t x_stride;
  int width, inner, shared_inner, pitch, slots;
  int ahead;                       // the shared expert's weights are asked for before the router has ended
  int trigger;                     // row pairs still to be asked for when the second launch may start
  int situ;
  float beta, linear_beta;         // linear_beta 0: no cap
};

// The CTA's row pairs: its part of the shared expert's, then its part of all wanted experts' in one line.
struct PairWalk {
  int inner, most, shared, shared_end, flat = 0, flat_end = 0;
  DEV PairWalk(const GateUpParams& p)
      : inner(p.inner), most(p.layout.most), shared(cut(p.shared_inner, blockIdx.x, gridDim.x)),
        shared_end(cut(p.shared_inner, blockIdx.x + 1, gridDim.x)) {}
  DEV void route(int found, int shared_inner) {
    flat = start(found, shared_inner, 0), flat_end = start(found, shared_inner, 1);
  }
  DEV int start(int found, int shared_inner, int next) const {
    const int routed = found * inner, cta = blockIdx.x + next, ctas = gridDim.x;
    // both parts together differ by one pair at most
    if (routed >= 2 * ctas) return cut(routed + shared_inner, cta, ctas) - cut(shared_inner, cta, ctas);
    return cut(routed, cta, ctas);
  }
  DEV bool has_shared() const { return shared < shared_end; }
  DEV int left() const { return shared_end - shared + flat_end - flat; }
  DEV bool next(Piece& p) {
    if (has_shared()) {
      p = {-1, shared, lesser(most, shared_end - shared)};
      shared += p.rows;
    } else {
      if (flat >= flat_end) return false;
      const int expert = flat / inner, row = flat - expert * inner;
      p = {expert, row, lesser(most, lesser(flat_end - flat, inner - row))};
      flat += p.rows;
    }
    return true;
  }
};

DEV float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }

DEV uint16_t activate(const GateUpParams& p, float gate, float up) {
  gate = round_bf16(gate), up = round_bf16(up);
  if (!p.situ) return f32_to_bf16(round_bf16(gate * sigmoid(gate)) * up);
  if (p.linear_beta != 0.f) up = p.linear_beta * tanhf(up / p.linear_beta);
  return f32_to_bf16(p.beta * tanhf(gate / p.beta) * sigmoid(gate) * up);
}

template <int N>
struct GateUp {
  const GateUpParams& p;
  Smem& s;
  const Ring ring;
  const Parts parts;
  const int pitch;

  DEV GateUp(const GateUpParams& p, Smem& s, float* parts_at, char* slots_at)
      : p(p), s(s), ring(s, slots_at, p.layout),
        parts{parts_at, p.layout.batch, 2 * p.layout.most, p.layout.lanes}, pitch(p.width * 2) {}

  DEV void fetch(const Piece& piece, Turn& turn) const {
    const bool own = piece.expert < 0;
    const int inner = own ? p.shared_inner : p.inner;
    const uint16_t* w = own ? p.shared : p.w + (int64_t)s.chosen.expert[piece.expert] * 2 * p.inner * p.width;
    const uint32_t bytes = piece.rows * pitch, to = ring.claim(turn, piece, 2 * bytes);
    copy_weights(to, w + (int64_t)piece.row * p.width, bytes, ring.landed(turn));
    copy_weights(to + p.layout.most * pitch, w + (int64_t)(inner + piece.row) * p.width, bytes, ring.landed(turn));
    turn.next();
  }

  DEV void consume(const uint4 (&x)[N], const Steps& steps) const {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, most = p.layout.most;
    Turn turn(p.layout.stages);
    Piece piece;
    int side = 0, n = 0;
    while (true) {
      const char* slot = ring.await(turn, piece);
      if (piece.rows == 0) break;
      const char* gate = slot + lesser(g, piece.rows - 1) * pitch;
      float c[4];
      product(c, gate, gate + most * pitch, x, steps);
      ring.release(turn);
      float* tile = parts.of(side, n, warp);
      if (g < piece.rows) parts.keep(tile, g, c[0], c[1]), parts.keep(tile, most + g, c[2], c[3]);
      if (threadIdx.x == 0) s.done[side][n] = piece;
      if (++n == p.layout.batch) finish(side, n), side ^= 1, n = 0;
    }
    if (n) finish(side, n);
  }

  DEV void finish(int side, int pieces) const {
    named_barrier(1, CONSUMERS);
    const int most = p.layout.most, lanes = p.layout.lanes;
    for (int i = threadIdx.x; i < pieces * most * lanes; i += CONSUMERS) {
      const int token = i & (lanes - 1), n = i / (most * lanes), row = i / lanes - n * most;
      const Piece piece = s.done[side][n];
      if (row >= piece.rows || token >= p.routing.tokens || !takes(s.chosen, piece.expert, token)) continue;
      const uint16_t value = activate(p, parts.total(side, n, row, token), parts.total(side, n, most + row, token));
      const int64_t at = (piece.expert < 0 ? p.slots : piece.expert) * p.routing.tokens + token;
      store_result(p.h + at * p.pitch + piece.row + row, value);
    }
  }
};

// Two CTAs share a multiprocessor, one of each launch, where their registers allow it.
template <int N>
__global__ void __launch_bounds__(THREADS, N <= 9 ? 2 : 1) gate_up_kernel(const __grid_constant__ GateUpParams p) {
  Smem& s = smem_base<Smem>();
  float* parts = reinterpret_cast<float*>(&s + 1);
  char* slots = reinterpret_cast<char*>(parts + 2 * p.layout.batch * WARPS * 2 * p.layout.most * p.layout.lanes);
  const GateUp<N> work(p, s, parts, slots);
  const bool fetches = threadIdx.x == CONSUMERS;
  PairWalk walk(p);
  Turn turn(p.layout.stages);
  Piece piece;
  // what needs no routing fills the ring first
  const auto fetch_shared = [&] {
    for (int i = 0; i < p.layout.stages && walk.has_shared(); i++) walk.next(piece), work.fetch(piece, turn);
  };
  if (fetches) {
    work.ring.init(p.layout.stages);
    if (p.ahead) fetch_shared();
  }
  wait_for_previous();
  if (fetches && !p.ahead) fetch_shared();
  const Steps steps(p.width, threadIdx.x / 32 % WARPS);
  const int token = threadIdx.x % 32 / 4;
  uint4 x[N];
  load_token(x, p.x + token * p.x_stride, token < p.routing.tokens && threadIdx.x < CONSUMERS, steps);
  const int found = list_experts(p.routing, nullptr, s.chosen);
  if (threadIdx.x < CONSUMERS) {
    work.consume(x, steps);
  } else if (fetches) {
    walk.route(found, p.shared_inner);
    bool triggered = false;
    // the second launch should ask for its weights when the last of this one's are under way, not beside the first
    while (true) {
      if (!triggered && walk.left() <= p.trigger) launch_dependents(), triggered = true;
      if (!walk.next(piece)) break;
      work.fetch(piece, turn);
    }
    work.ring.close(turn);
  }
}
