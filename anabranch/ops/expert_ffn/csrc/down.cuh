// Second launch: a CTA owns some output columns, that is some rows of every down matrix, for all tokens: so the
// weighted sum over a token's experts never leaves it. Weights are asked for while the first launch still runs.
#pragma once
#include "stream.cuh"

struct DownParams {
  Routing routing;
  Layout layout;
  const float* weights;            // [tokens, top_k]
  const uint16_t *h, *w, *shared;  // h: see gate_up.cuh; w [E, width, inner], shared [width, shared_inner] or null
  uint16_t* y;                     // [tokens, width]
  int64_t y_stride;
  int width, inner, shared_inner, pitch, slots;
};

// The CTA's rows of every wanted expert in ascending order, then of the shared one.
struct RowWalk {
  int most, begin, end, found, all, index = 0, row;
  DEV RowWalk(const DownParams& p, int begin, int end, int found)
      : most(p.layout.most), begin(begin), end(end), found(found),
        all(begin == end ? 0 : found + (p.shared != nullptr)), row(begin) {}
  DEV bool next(Piece& p) {
    if (row == end) index++, row = begin;
    if (index >= all) return false;
    p = {index < found ? index : -1, row, lesser(most, end - row)};
    row += p.rows;
    return true;
  }
};

// N: steps of a warp. HELD: elements of the output that a thread sums.
template <int N, int HELD>
struct Down {
  const DownParams& p;
  Smem& s;
  const Ring ring;
  const Parts parts;
  const int begin, end;
  float sum[HELD] = {}, own[HELD] = {};
  static constexpr bool AHEAD = N <= 4;  // the next expert's hidden rows wait in registers, where there are enough

  DEV Down(const DownParams& p, Smem& s, float* parts_at, char* slots_at)
      : p(p), s(s), ring(s, slots_at, p.layout), parts{parts_at, p.layout.batch, p.layout.most, p.layout.lanes},
        begin(cut(p.width, blockIdx.x, gridDim.x)), end(cut(p.width, blockIdx.x + 1, gridDim.x)) {}

  DEV int columns(int expert) const { return expert < 0 ? p.shared_inner : p.inner; }

  DEV void fetch(const Piece& piece, Turn& turn) const {
    const int inner = columns(piece.expert);
    const uint16_t* w =
        piece.expert < 0 ? p.shared : p.w + (int64_t)s.chosen.expert[piece.expert] * p.width * p.inner;
    const uint32_t bytes = piece.rows * inner * 2, to = ring.claim(turn, piece, bytes);
    copy_weights(to, w + (int64_t)piece.row * inner, bytes, ring.landed(turn));
    turn.next();
  }

  // Of the index-th expert of the list; behind the last comes the shared one.
  template <int M>
  DEV void load_hidden(uint4 (&b)[M], int index, int found) const {
    const int token = threadIdx.x % 32 / 4, expert = index < found ? index : -1;
    const bool known = (expert >= 0 || p.shared != nullptr) && token < p.routing.tokens;
    const bool there = known && takes(s.chosen, expert, token);
    const int64_t row = (int64_t)(expert < 0 ? p.slots : expert) * p.routing.tokens + token;
    load_token(b, p.h + row * p.pitch, there, Steps(columns(expert), threadIdx.x / 32));
  }

  DEV void consume(int found) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
    uint4 b[N], later[AHEAD ? N : 1];
    if constexpr (AHEAD) load_hidden(later, 0, found);
    Turn turn(p.layout.stages);
    Piece piece;
    int side = 0, n = 0;
    while (true) {
      const char* slot = ring.await(turn, piece);
      if (piece.rows == 0) break;
      if (piece.row == begin) {
        if constexpr (AHEAD) {
#pragma unroll
          for (int i = 0; i < N; i++) b[i] = later[i];
          if (piece.expert >= 0) load_hidden(later, piece.expert + 1, found);
        } else {
          load_hidden(b, piece.expert < 0 ? found : piece.expert, found);
        }
      }
      const int last = piece.rows - 1, row_bytes = columns(piece.expert) * 2;
      float c[4];
      product(c, slot + lesser(g, last) * row_bytes, slot + lesser(g + 8, last) * row_bytes, b,
              Steps(columns(piece.expert), warp));
      ring.release(turn);
      float* tile = parts.of(side, n, warp);
      if (g <= last) parts.keep(tile, g, c[0], c[1]);
      if (g + 8 <= last) parts.keep(tile, g + 8, c[2], c[3]);
      if (threadIdx.x == 0) s.done[side][n] = piece;
      if (++n == p.layout.batch) add(side, n), side ^= 1, n = 0;
    }
    if (n) add(side, n);
    store();
  }

  DEV int token_of(int i) const { return (threadIdx.x + i * CONSUMERS) & (p.layout.lanes - 1); }
  DEV int row_of(int i) const { return (int)(threadIdx.x + i * CONSUMERS) / p.layout.lanes; }

  // A product and a sum round apart, as in ops/expert_sum.
  DEV void add(int side, int pieces) {
    named_barrier(1, CONSUMERS);
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      const int token = token_of(i);
      for (int n = 0; n < pieces; n++) {
        const Piece piece = s.done[side][n];
        const int row = begin + row_of(i) - piece.row;
        if (row < 0 || row >= piece.rows || token >= p.routing.tokens) continue;
        if (!takes(s.chosen, piece.expert, token)) continue;
        const float value = round_bf16(parts.total(side, n, row, token));
        if (piece.expert < 0) own[i] = value;
        else sum[i] = __fadd_rn(sum[i], __fmul_rn(value, s.chosen.weight[piece.expert][token]));
      }
    }
  }

  DEV void store() const {
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      const int row = begin + row_of(i);
      if (row >= end || token_of(i) >= p.routing.tokens) continue;
      const float value = round_bf16(sum[i]);
      const uint16_t y = f32_to_bf16(p.shared != nullptr ? value + own[i] : value);
      store_result(p.y + token_of(i) * p.y_stride + row, y);
    }
  }
};

template <int N, int HELD>
__global__ void __launch_bounds__(THREADS, N <= 4 && HELD == 1 ? 2 : 1)
    down_kernel(const __grid_constant__ DownParams p) {
  Smem& s = smem_base<Smem>();
  float* parts = reinterpret_cast<float*>(&s + 1);
  char* slots = reinterpret_cast<char*>(parts + 2 * p.layout.batch * WARPS * p.layout.most * p.layout.lanes);
  Down<N, HELD> work(p, s, parts, slots);
  const bool fetches = threadIdx.x == CONSUMERS;
  if (fetches) work.ring.init(p.layout.stages);
  // the choice was made before the first launch let this one start
  const int found = list_experts(p.routing, p.weights, s.chosen);
  if (fetches) {
    RowWalk walk(p, work.begin, work.end, found);
    Turn turn(p.layout.stages);
    Piece piece;
    while (walk.next(piece)) work.fetch(piece, turn);
    work.ring.close(turn);
  } else if (threadIdx.x < CONSUMERS) {
    wait_for_previous();
    launch_dependents();
    work.consume(found);
  }
}
