// What both launches of the few-token experts share: whose weights are wanted, the ring they pass through, and the
// product of a piece of them with at most 8 tokens.
//
// A CTA owns a fixed share of weight rows. One thread brings them in pieces of whole rows by bulk copies into a ring;
// eight warps multiply every piece, each its own eighth of the columns, and leave partial sums in shared memory, which
// are added in the order of the warps. So an element's order of addition depends on its row length alone: not on the
// share, the batch or the timing.
#pragma once
#ifdef ANABRANCH_EMULATE
#include "hopper.h"
#else
#include "stream_ptx.cuh"
#endif

constexpr int WARPS = 8, CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 32;
constexpr int TOKENS = 8, MAX_PAIRS = 128, MAX_STAGES = 32, MAX_BATCH = 8, NOBODY = 0x7fffffff;

struct Routing {
  const int64_t* experts;  // [tokens, top_k], global
  int tokens, top_k, first, count;
};

// How a launch is laid out. A stage of the ring holds `most` rows (gate-up: of gate and of up each).
struct Layout {
  int most, stages, slot_bytes;
  int batch, lanes;  // pieces whose partial sums wait for each other; columns of a partial sum: 2, 4 or 8
};

struct Piece { int expert, row, rows; };  // index into the list of experts, or -1: the shared one

// The distinct local experts in ascending order, who takes each and with what weight.
struct Chosen {
  int wanted[MAX_PAIRS], leads[MAX_PAIRS], expert[MAX_PAIRS];
  uint32_t takers[MAX_PAIRS];
  float value[MAX_PAIRS], weight[MAX_PAIRS][TOKENS];
};

struct alignas(128) Smem {
  uint64_t full[MAX_STAGES], empty[MAX_STAGES];
  Chosen chosen;
  Piece here[MAX_STAGES], done[2][MAX_BATCH];  // what lies in a slot, none behind the last; what waits to be summed
};

DEV int lesser(int a, int b) { return a < b ? a : b; }
// Where part `part` of `parts` equal parts of `total` begins.
DEV int cut(int total, int part, int parts) { return (int)((unsigned)total * (unsigned)part / (unsigned)parts); }

// A place in the ring, and which time round it is.
struct Turn {
  int stages, stage = 0;
  uint32_t parity = 0;
  DEV explicit Turn(int stages) : stages(stages) {}
  DEV void next() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

struct Ring {
  Smem& s;
  char* const slots;
  const int slot_bytes;
  DEV Ring(Smem& s, char* slots, const Layout& l) : s(s), slots(slots), slot_bytes(l.slot_bytes) {}
  DEV void init(int stages) const {
    for (int i = 0; i < stages; i++)
      barrier_init(shared_address(s.full + i), 1), barrier_init(shared_address(s.empty + i), WARPS);
    barrier_init_done();
    fence_async_proxy();
  }
  DEV uint32_t landed(const Turn& turn) const { return shared_address(s.full + turn.stage); }
  // Waits until the slot is free; its address.
  DEV uint32_t claim(const Turn& turn, const Piece& piece, uint32_t bytes) const {
    barrier_wait(shared_address(s.empty + turn.stage), turn.parity ^ 1);
    s.here[turn.stage] = piece;
    barrier_expect(landed(turn), bytes);
    return shared_address(slots) + turn.stage * slot_bytes;
  }
  DEV void close(const Turn& turn) const { claim(turn, {0, 0, 0}, 0); }
  // Waits until the next piece has landed; where.
  DEV const char* await(const Turn& turn, Piece& piece) const {
    barrier_wait(landed(turn), turn.parity);
    piece = s.here[turn.stage];
    return slots + turn.stage * slot_bytes;
  }
  DEV void release(Turn& turn) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(s.empty + turn.stage));
    turn.next();
  }
};

// Fills `s`, by all threads of the CTA; how many distinct local experts there are.
DEV int list_experts(const Routing& r, const float* weights, Chosen& s) {
  const int tid = threadIdx.x, pairs = r.tokens * r.top_k;
  int mine = -1;
  if (tid < pairs) {
    const int64_t local = load_early(r.experts + tid) - r.first;
    if (local >= 0 && local < r.count) mine = (int)local;
    s.wanted[tid] = mine;
    if (weights != nullptr) s.value[tid] = load_early(weights + tid);
  }
  __syncthreads();
  bool leads = mine >= 0;
  if (leads)
    for (int q = 0; q < tid; q++) leads &= s.wanted[q] != mine;
  if (tid < pairs) s.leads[tid] = leads ? mine : NOBODY;
  __syncthreads();
  int rank = 0, found = 0;
  for (int q = 0; q < pairs; q++) rank += s.leads[q] < mine, found += s.leads[q] != NOBODY;
  if (leads) {
    uint32_t takers = 0;
    for (int token = 0, q = 0; token < r.tokens; token++)
      for (int choice = 0; choice < r.top_k; choice++, q++)
        if (s.wanted[q] == mine) takers |= 1u << token, s.weight[rank][token] = s.value[q];
    s.expert[rank] = mine, s.takers[rank] = takers;
  }
  __syncthreads();
  return found;
}

DEV bool takes(const Chosen& s, int expert, int token) { return expert < 0 || (s.takers[expert] >> token & 1); }

// The columns of a row that a lane multiplies: in every step of 32 of its warp, 8 from begin + 32 * step on, if any are
// left.
struct Steps {
  int begin, left, columns;  // the last: of the whole warp
  DEV Steps(int of, int warp) {
    const int all = (of + 31) / 32, first = cut(all, warp, WARPS) * 32;
    columns = lesser(cut(all, warp + 1, WARPS) * 32, of) - first;
    begin = first + threadIdx.x % 4 * 8, left = first + columns - begin;
  }
  DEV bool has(int i) const { return i * 32 < left; }
};

// A lane's columns of its token's row, which an earlier kernel wrote.
template <int N>
DEV void load_token(uint4 (&b)[N], const uint16_t* row, bool there, const Steps& steps) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    b[i] = make_uint4(0, 0, 0, 0);
    if (there && steps.has(i)) b[i] = load_written(row + steps.begin + i * 32);
  }
}

// Row `low` and row `high` (8 further down the tile) of each lane times the tokens. A lane reads 16 bytes of a row at
// once: the instruction sees the columns in another order, the same for weights and tokens. WHOLE: N full steps.
template <bool WHOLE, int N>
DEV void multiply(float (&c)[4], const char* low, const char* high, const uint4 (&b)[N], const Steps& steps) {
  float sum[4][4] = {};
#pragma unroll
  for (int i = 0; i < N; i++) {
    uint4 x = make_uint4(0, 0, 0, 0), y = x;
    if (WHOLE || steps.has(i))
      x = *reinterpret_cast<const uint4*>(low + 64 * i), y = *reinterpret_cast<const uint4*>(high + 64 * i);
    const uint32_t front[4] = {x.x, y.x, x.y, y.y}, back[4] = {x.z, y.z, x.w, y.w};
    mma_bf16(sum[i % 2 * 2], front, b[i].x, b[i].y);
    mma_bf16(sum[i % 2 * 2 + 1], back, b[i].z, b[i].w);
    if (N > 4 && i % 3 == 2) __syncwarp();  // else all reads would come first, and not fit into the registers
  }
#pragma unroll
  for (int e = 0; e < 4; e++) c[e] = (sum[0][e] + sum[1][e]) + (sum[2][e] + sum[3][e]);
}

template <int N>
DEV void product(float (&c)[4], const char* low, const char* high, const uint4 (&b)[N], const Steps& steps) {
  low += 2 * steps.begin, high += 2 * steps.begin;
  if (steps.columns == N * 32) multiply<true>(c, low, high, b, steps);
  else multiply<false>(c, low, high, b, steps);
}

// The partial sums of a batch of pieces: [side][piece][warp][rows][lanes].
struct Parts {
  float* at;
  int batch, rows, lanes;
  DEV float* of(int side, int piece, int warp) const {
    return at + (((side * batch + piece) * WARPS + warp) * rows) * lanes;
  }
  DEV void keep(float* tile, int row, float a, float b) const {  // of tokens 2 * (lane % 4) and the next
    const int token = threadIdx.x % 4 * 2;
    if (token < lanes) *reinterpret_cast<float2*>(tile + row * lanes + token) = make_float2(a, b);
  }
  DEV float total(int side, int piece, int row, int token) const {
    float sum = of(side, piece, 0)[row * lanes + token];
#pragma unroll
    for (int warp = 1; warp < WARPS; warp++) sum += of(side, piece, warp)[row * lanes + token];
    return sum;
  }
};
