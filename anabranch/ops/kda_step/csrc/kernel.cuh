// The decode step of KDA in one launch: conv window + SiLU + L2 norms + decay + delta rule + gated RMSNorm.
//
// A cluster of SPLIT CTAs owns one head of one request; each CTA holds D / SPLIT value rows of its state on the chip
// while the request's tokens pass. Per token, one pass over the rows:
//     S <- decay * S;  pred = S k;  part = S q;  delta = beta (v - pred);  o = part + (q k) delta;  S <- S + delta k^T
// The L2 norms of q and k enter as scalars, so nothing has to be reduced before the pass.
#pragma once
#include "step.cuh"

enum Copies { REGISTERS, BULK_IN, BULK_BOTH };          // how the state travels: plain loads; bulk copies; out as well
enum Release { AT_ONCE, BEHIND_WAIT, BEHIND_PASS };     // the kernel behind this one
enum Hint { KEEP = 0, LOADS_FIRST = 1, STORES_FIRST = 2, BOTH_FIRST = 3 };  // what leaves L2 first

// One way to build the kernel. RESIDENT: CTAs on an SM at a time. HELD: rows of a thread in registers at a time.
// F_B: f_b is applied inside. MANY: more than one token a request.
template <class State_, int SPLIT_, int THREADS_, int RESIDENT_, int HELD_, Copies COPIES_, int HINT_ = KEEP,
          bool F_B_ = false, bool MANY_ = false>
struct Variant {
  using State = State_;
  static constexpr int SPLIT = SPLIT_, THREADS = THREADS_, RESIDENT = RESIDENT_, HELD = HELD_, HINT = HINT_;
  static constexpr Copies COPIES = COPIES_;
  static constexpr bool F_B = F_B_, MANY = MANY_;
  static constexpr int TILE_BYTES = COPIES == REGISTERS ? 0 : D / SPLIT * D * (int)sizeof(State);
};

struct alignas(128) Smem {
  float q[D], k[D], decay[D];  // lane order; q and k before their L2 norm
  float v[D], o[D];            // own rows
  float part[2][D / 4];        // sums of o^2 over 4 rows each, from the whole cluster; by the token's parity
  uint64_t landed[8];          // state tile, one barrier a group of rows
  uint64_t all_parts[2];       // part[] complete (SPLIT > 1); by the token's parity
};

template <class V>
struct Step {
  using State = typename V::State;
  static constexpr int R = D / V::SPLIT;              // rows of this CTA
  static constexpr int G = V::THREADS / LANES;        // rows worked on at once
  static constexpr int ROUNDS = (R + G - 1) / G;      // rows of a thread
  static constexpr int HELD = V::HELD < ROUNDS ? V::HELD : ROUNDS;
  static constexpr int CHANNELS = (2 * D + R + V::THREADS - 1) / V::THREADS;  // conv channels of a thread
  static constexpr int PIECES = sizeof(State);        // 16-byte pieces of a lane's part of a row
  static constexpr int ROW = D * sizeof(State);       // bytes
  static constexpr int F_B_ROWS = V::F_B ? D / G : 1;
  static constexpr bool TILED = V::COPIES != REGISTERS;
  static constexpr bool LOAD_HINT = (V::HINT & LOADS_FIRST) != 0, STORE_HINT = (V::HINT & STORES_FIRST) != 0;
  // registers enough to keep q, k and decay for all rows
  static constexpr bool HOIST = 65536 / (V::THREADS * V::RESIDENT) >= 160;
  static_assert(TILED || HELD == ROUNDS, "without a tile a thread holds all its rows");
  static_assert(!V::MANY || (V::COPIES != BULK_BOTH && !V::F_B), "several tokens: not built with these");

  const StepParams& p;
  Smem& s;
  char* const tile;
  int tid, lane, warp, l, g, rank, head, request;
  uint64_t policy = 0;
  int slot, target;
  uint4 raw[TILED ? 1 : ROUNDS][PIECES];
  int channel[CHANNELS];
  uint32_t window[CHANNELS][3], newest[CHANNELS];
  float4 taps[CHANNELS];
  float a_log, norm, dt, forget, beta_logit;
  uint4 f_b[F_B_ROWS][2], f_a[2];
  uint32_t gate_bits;

  DEV Step(const StepParams& p, Smem& s) : p(p), s(s), tile(reinterpret_cast<char*>(&s + 1)) {
    tid = threadIdx.x;
    ASSUME(tid >= 0 && tid < V::THREADS);
    lane = tid % 32, warp = tid / 32, l = tid % LANES, g = tid / LANES;
    rank = (unsigned)blockIdx.x % V::SPLIT, head = (unsigned)blockIdx.x / V::SPLIT, request = blockIdx.y;
  }

  DEV int width() const { return p.heads * D; }
  DEV int tokens() const { return V::MANY ? p.tokens : 1; }
  DEV bool has_channel(int i) const { return tid + i * V::THREADS < 2 * D + R; }
  DEV bool has_rows() const { return G <= R || g < R; }  // uniform over a warp
  DEV int gated_channel() const { return V::F_B ? l * G + g : tid - (V::THREADS - D); }
  DEV bool has_gate() const { return V::F_B ? l < F_B_ROWS : gated_channel() >= 0; }
  DEV int64_t row_of(int token) const { return (int64_t)request * tokens() + token; }
  DEV int in_pool(int64_t n) const { return (uint64_t)n < (uint64_t)p.pool ? (int)n : -1; }
  DEV uint16_t* out_of(int token) const { return p.out + row_of(token) * width() + head * D + rank * R; }
  DEV char* state_of(int slot, int head) const {
    return static_cast<char*>(p.state) + ((int64_t)slot * p.state_pitch + (int64_t)head * D * D) * sizeof(State);
  }
  DEV int target_of(int token) const {
    if (p.keep != nullptr) return in_pool(p.keep[request * p.keep_stride + token * p.keep_step]);
    return token == tokens() - 1 ? slot : -1;
  }

  // --- everything that does not come from the kernel before ---------------------------------------------------------

  DEV void load_state() {
    if constexpr (V::HINT != KEEP) policy = policy_evict_first();
    const char* from = state_of(slot, head) + rank * R * ROW;
    if constexpr (TILED) {
      if (tid == 0) {
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) mbar_init(&s.landed[r]);
        mbar_fence();
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {  // a barrier for every G rows: the pass starts when the first have landed
          constexpr int BYTES = R / ROUNDS * ROW;
          mbar_expect(&s.landed[r], BYTES);
          bulk_load<LOAD_HINT>(tile + r * BYTES, from + r * BYTES, BYTES, &s.landed[r], policy);
        }
      }
    } else if (has_rows()) {
#pragma unroll
      for (int r = 0; r < ROUNDS; r++)
#pragma unroll
        for (int c = 0; c < PIECES; c++) raw[r][c] = ld_state<LOAD_HINT>(from + (r * G + g) * ROW + c * 128 + l * 16, policy);
    }
  }

  // Keeps memory busy while the first CTAs wait for their inputs. A hint: never wrong, at worst slower.
  DEV void prefetch_ahead() const {
    if (V::SPLIT > 1 || p.prefetch <= 0 || tid != 32) return;
    const unsigned n = request * p.heads + head + p.prefetch, heads = p.heads;
    if (n >= (unsigned)(p.requests * p.heads)) return;
    const int next = in_pool(p.slots[n / heads * p.slot_stride]);
    if (next >= 0) bulk_prefetch(state_of(next, n % heads), D * ROW);
  }

  DEV void load_window() {
    const uint16_t* conv = p.conv + (int64_t)slot * p.conv_pitch;
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {  // conv channel c: q is 0..127, k 128..255, own value rows from 256
      const int c = tid + i * V::THREADS;
      channel[i] = (c < 2 * D ? (c / D) * width() + c % D : 2 * width() + rank * R + c - 2 * D) + head * D;
      if (!has_channel(i)) continue;
#pragma unroll
      for (int j = 0; j < 3; j++) window[i][j] = conv[(int64_t)j * 3 * width() + channel[i]];
      taps[i] = reinterpret_cast<const float4*>(p.conv_weight)[channel[i]];
    }
  }

  DEV void load_weights() {
    a_log = p.a_log[head];
    norm = tid < R ? p.norm_weight[rank * R + tid] : 0.f;
    dt = has_gate() ? p.dt_bias[head * D + gated_channel()] : 0.f;
    if constexpr (V::F_B) {
#pragma unroll
      for (int r = 0; r < F_B_ROWS; r++)
#pragma unroll
        for (int c = 0; c < 2; c++)
          f_b[r][c] = reinterpret_cast<const uint4*>(p.f_b + (int64_t)(head * D + r * G + g) * D)[c * 8 + l];
    }
  }

  // --- one token ----------------------------------------------------------------------------------------------------

  DEV void load_inputs(int token) {
    const int64_t row = row_of(token);
#pragma unroll
    for (int i = 0; i < CHANNELS; i++)
      if (has_channel(i)) newest[i] = p.qkv[row * p.qkv_stride + channel[i]];
    forget = 0.f;
    if constexpr (V::F_B) {
#pragma unroll
      for (int c = 0; c < 2; c++) f_a[c] = reinterpret_cast<const uint4*>(p.forget + row * p.forget_stride)[c * 8 + l];
    } else if (has_gate()) {
      forget = bf16_to_f32(p.forget[row * p.forget_stride + head * D + gated_channel()]);
    }
    gate_bits = tid < R ? p.gate[row * p.gate_stride + head * D + rank * R + tid] : 0;
    beta_logit = bf16_to_f32(p.beta[row * p.beta_stride + head]);
  }

  DEV void share_inputs() {
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
      const int c = tid + i * V::THREADS;
      if (!has_channel(i)) continue;
      const float y = convolve(taps[i], window[i], newest[i]);
      if (c < D) s.q[lane_order<State>(c)] = y;
      else if (c < 2 * D) s.k[lane_order<State>(c - D)] = y;
      else s.v[c - 2 * D] = y;
    }
    if constexpr (V::F_B) {
#pragma unroll
      for (int r = 0; r < F_B_ROWS; r++) {
        const float f = row_sum(dot8(f_b[r][1], f_a[1], dot8(f_b[r][0], f_a[0], 0.f)));
        if (l == r) forget = round_bf16(f);  // as a bf16 GEMM would round it
      }
    }
    if (has_gate()) s.decay[lane_order<State>(gated_channel())] = decay_of(forget + dt, __expf(a_log), p.lower_bound);
  }

  // The window after this token: the oldest row leaves, the raw row enters. q and k channels are one rank's to write.
  DEV void keep_window() const {
    if (target < 0) return;
    uint16_t* conv = p.conv + (int64_t)target * p.conv_pitch;
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
      const int c = tid + i * V::THREADS;
      if (!has_channel(i) || (c < 2 * D && (c % D) / R != rank)) continue;
      conv[channel[i]] = (uint16_t)window[i][1];
      conv[(int64_t)3 * width() + channel[i]] = (uint16_t)window[i][2];
      conv[(int64_t)6 * width() + channel[i]] = (uint16_t)newest[i];
    }
  }

  DEV void load_rows(int first, float (&S)[HELD][16]) {
#pragma unroll
    for (int r = 0; r < HELD; r++) {
      if constexpr (TILED) {
        mbar_wait(&s.landed[first + r], 0);
        uint4 pieces[PIECES];
#pragma unroll
        for (int c = 0; c < PIECES; c++)
          pieces[c] = *reinterpret_cast<const uint4*>(tile + ((first + r) * G + g) * ROW + c * 128 + l * 16);
        unpack(pieces, S[r]);
      } else {
        unpack(raw[r], S[r]);
      }
    }
  }

  DEV void keep_rows(int first, const float (&S)[HELD][16], char* to) {
#pragma unroll
    for (int r = 0; r < HELD; r++) {
      uint4 pieces[PIECES];
      pack(S[r], pieces);
#pragma unroll
      for (int c = 0; c < PIECES; c++) {
        const int at = ((first + r) * G + g) * ROW + c * 128 + l * 16;
        if constexpr (V::COPIES == BULK_BOTH || (V::MANY && TILED)) *reinterpret_cast<uint4*>(tile + at) = pieces[c];
        if constexpr (V::MANY && !TILED) raw[r][c] = pieces[c];  // packed: a bf16 state is rounded at every token
        if constexpr (V::COPIES != BULK_BOTH)
          if (target >= 0) st_state<STORE_HINT>(to + at, pieces[c], policy);
      }
      if constexpr (V::COPIES == BULK_BOTH) {  // the 4 rows of a warp are contiguous
        fence_async_proxy();
        __syncwarp();
        const int at = ((first + r) * G + warp * 4) * ROW;
        if (lane == 0 && target >= 0) bulk_store<STORE_HINT>(to + at, tile + at, 4 * ROW, policy);
      }
    }
  }

  DEV void share_part(int row_block, float sum, int parity) {
    float* part = &s.part[parity][row_block];
    if constexpr (V::SPLIT == 1) {
      if (lane == 0) *part = sum;
    } else {  // tells the peers, too, that this CTA has read the old conv window
      if (lane < V::SPLIT) st_async_cluster(part, &s.all_parts[parity], lane, sum);
    }
  }

  DEV void pass(int parity) {
    const float4* q4 = reinterpret_cast<const float4*>(s.q) + l;
    const float4* k4 = reinterpret_cast<const float4*>(s.k) + l;
    const float4* d4 = reinterpret_cast<const float4*>(s.decay) + l;
    char* to = state_of(target, head) + rank * R * ROW;
    const float beta = sigmoid(beta_logit);
    float rq = 0.f, rk = 0.f, qk_normed = 0.f;
    float4 qh[HOIST ? 4 : 1], kh[HOIST ? 4 : 1], dh[HOIST ? 4 : 1];
    if constexpr (HOIST) {
#pragma unroll
      for (int j = 0; j < 4; j++) qh[j] = q4[j * 8], kh[j] = k4[j * 8], dh[j] = d4[j * 8];
    }
#pragma unroll
    for (int first = 0; first < ROUNDS; first += HELD) {
      float S[HELD][16], sk[HELD], sq[HELD], gain[HELD];
      load_rows(first, S);
#pragma unroll
      for (int r = 0; r < HELD; r++) sk[r] = sq[r] = 0.f;
      float qq = 0.f, kk = 0.f, qk = 0.f;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float4 q = HOIST ? qh[HOIST ? j : 0] : q4[j * 8], k = HOIST ? kh[HOIST ? j : 0] : k4[j * 8];
        const float4 d = HOIST ? dh[HOIST ? j : 0] : d4[j * 8];
        const float qv[4] = {q.x, q.y, q.z, q.w}, kv[4] = {k.x, k.y, k.z, k.w}, dv[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if (first == 0) qq = fmaf(qv[i], qv[i], qq), kk = fmaf(kv[i], kv[i], kk), qk = fmaf(qv[i], kv[i], qk);
#pragma unroll
          for (int r = 0; r < HELD; r++) {
            float& e = S[r][4 * j + i];
            e *= dv[i];
            sk[r] = fmaf(e, kv[i], sk[r]);
            sq[r] = fmaf(e, qv[i], sq[r]);
          }
        }
      }
      if (first == 0) {
        rq = rsqrtf(row_sum(qq) + 1e-6f) * Q_SCALE;
        rk = rsqrtf(row_sum(kk) + 1e-6f);
        qk_normed = row_sum(qk) * rq * rk;
      }
#pragma unroll
      for (int r = 0; r < HELD; r++) {
        const int row = (first + r) * G + g;
        const float delta = beta * (s.v[row] - row_sum(sk[r]) * rk);
        const float o = round_bf16(fmaf(qk_normed, delta, row_sum(sq[r]) * rq));
        gain[r] = delta * rk;
        if (l == 0) s.o[row] = o;
        share_part((rank * R + (first + r) * G) / 4 + warp, xor_sum(xor_sum(o * o, 8), 16), parity);
      }
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float4 k = HOIST ? kh[HOIST ? j : 0] : k4[j * 8];
#pragma unroll
        for (int r = 0; r < HELD; r++) {
          S[r][4 * j] = fmaf(gain[r], k.x, S[r][4 * j]), S[r][4 * j + 1] = fmaf(gain[r], k.y, S[r][4 * j + 1]);
          S[r][4 * j + 2] = fmaf(gain[r], k.z, S[r][4 * j + 2]), S[r][4 * j + 3] = fmaf(gain[r], k.w, S[r][4 * j + 3]);
        }
      }
      keep_rows(first, S, to);
    }
  }

  DEV void write_output(int token) const {
    if (warp * 32 >= R) return;
    float sum = s.part[V::MANY ? token & 1 : 0][lane];
#pragma unroll
    for (int m = 1; m < 32; m *= 2) sum = xor_sum(sum, m);
    const float y = s.o[tid % D] * rsqrtf(sum * (1.f / D) + p.eps) * norm * sigmoid(bf16_to_f32(gate_bits));
    if (tid < R) out_of(token)[tid] = f32_to_bf16(y);
  }

  // Two barriers by the token's parity: a CTA that is a token ahead must not count on a barrier that still waits.
  DEV void expect_parts(int token) {
    if (tid == 0 && token < tokens()) mbar_expect(&s.all_parts[token & 1], sizeof(s.part[0]));
  }

  DEV void one_token(int token) {
    share_inputs();
    if constexpr (V::SPLIT == 1) keep_window();
    __syncthreads();
    if constexpr (V::SPLIT > 1)
      if (!V::MANY || token == 0) cluster_wait();
    if (has_rows()) pass(V::MANY ? token & 1 : 0);
    if (p.release == BEHIND_PASS && token == 0) griddep_launch();
    __syncthreads();
    if constexpr (V::SPLIT > 1) mbar_wait(&s.all_parts[V::MANY ? token & 1 : 0], V::MANY ? (token >> 1) & 1 : 0);
    write_output(token);
    // only now has every CTA of the cluster read the old window, of which q and k are common to all
    if constexpr (V::SPLIT > 1) keep_window();
  }

  DEV void next_token(int token) {  // several tokens: arm the barrier of the token after the next, shift, load
    if constexpr (V::SPLIT > 1) expect_parts(token + 2);
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) window[i][0] = window[i][1], window[i][1] = window[i][2], window[i][2] = newest[i];
    target = target_of(token + 1);
    load_inputs(token + 1);
  }

  DEV void no_slot() const {
    griddep_wait();  // the kernel before may still read what the output's memory held
    for (int token = 0; token < tokens(); token++)
      if (tid < R) out_of(token)[tid] = 0;
  }

  DEV void run() {
    // the kernel behind reads weights early, and nothing that this one or the one before writes
    if (p.release == AT_ONCE) griddep_launch_at_once();
    if (!p.early) griddep_wait();
    slot = in_pool(p.slots[request * p.slot_stride]);
    if (slot < 0) return no_slot();  // uniform over the cluster
    if constexpr (V::SPLIT > 1) {
      if (tid == 0) mbar_init(&s.all_parts[0]), mbar_init(&s.all_parts[1]), mbar_fence();
      expect_parts(0);
      if constexpr (V::MANY) expect_parts(1);
      cluster_arrive_relaxed();  // pairs with cluster_wait: every CTA is up, its barriers ready, before it is written to
    }
    target = target_of(0);
    load_state();
    prefetch_ahead();
    load_window();
    load_weights();
    griddep_wait();
    if (p.release == BEHIND_WAIT) griddep_launch();
    load_inputs(0);
    one_token(0);
    if constexpr (V::MANY)
      for (int token = 1; token < tokens(); token++) next_token(token - 1), one_token(token);
    if constexpr (V::COPIES == BULK_BOTH) bulk_store_wait();  // the tile must outlive the copies
  }
};

template <class V>
__global__ void __launch_bounds__(V::THREADS, V::RESIDENT) kda_step_kernel(const __grid_constant__ StepParams p) {
  Step<V>(p, smem_base<Smem>()).run();
}
