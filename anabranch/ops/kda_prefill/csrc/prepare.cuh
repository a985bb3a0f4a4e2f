// First kernel of the chunked prefill for Hopper: what triton_prepare.py computes, a CTA a (chunk, head).
//
// A warp owns 8 tokens, a lane 4 channels of them, so that products of decays along tokens stay in registers. Pairs
// (i, j) are met at dyadic levels as there: at half length Z both are scaled to the last token of the left half, so no
// factor is above 1. Levels 1 to 4 lie inside a warp's tokens; for 8, 16 and 32 the warps exchange the decay over each
// group of 8 tokens. Operands of A, R and the inverse are fp16, as all their values are at most 1 in size; what the
// second kernel reads is bf16.
#pragma once
#ifdef ANABRANCH_EMULATE
#include "matrix.h"
#else
#include "prefill_ptx.cuh"
#endif
#include "layout.cuh"

constexpr int GROUP = 8, GROUPS = 8;            // tokens of a warp, warps
constexpr int LEVEL_BYTES = 96 * D * 2;         // operands of one level: 64 rows of k, 32 of q
constexpr int PRIVATE_BYTES = 3 * LEVEL_BYTES / GROUPS;
constexpr float LOG2_E = 1.4426950408889634f, Q_SCALE = 0.08838834764831845f;

// Strides are in elements. Rows are bf16 [T, heads, D], every row on 16 bytes; what is behind a segment may be NaN.
struct PrepareParams {
  const uint16_t *q, *k, *f;    // convolved, not normed; output of f_b
  const uint16_t* b;            // [T, heads] write-strength logits
  const float *dt_bias, *a_log; // [heads, D], [heads]
  const int64_t* offsets;       // [segments + 1]
  uint16_t* tiles;              // [chunks, heads, PLACE], see chunked.py
  float* scales;                // [chunks, heads, SCALES]
  int64_t q_stride, k_stride, f_stride, b_stride;
  int segments;
  float bound;                  // < 0: g = bound * sigmoid(rate * zeta); 0: g = -rate * softplus(zeta)
};

struct alignas(128) PrepareSmem {
  char operands[3 * LEVEL_BYTES];      // first each warp's own rows and operands, then those of levels 8, 16, 32
  float total[GROUPS][D];              // decay over a group
  float near[GROUPS][GROUP][GROUP];    // A within a group
  float beta[CHUNK];
  char A[CHUNK * CHUNK * 2], T[CHUNK * CHUNK * 2], R[CHUNK * CHUNK * 2];  // fp16, fp16 of bf16 values, bf16
};

static_assert(2 * (sizeof(PrepareSmem) + 1024) <= 233472, "two CTAs an SM");

struct Prepare {
  using Decays = float[GROUP][4];

  const PrepareParams& p;
  PrepareSmem& s;
  int tid, lane, warp, row, pair;  // row, pair: this lane's place in an 8 x 8 matrix
  int head;
  int64_t place, first;
  int live;                        // of this warp's 8 tokens
  char* mine;                      // this warp's part of s.operands
  uint32_t k[GROUP][2], q[GROUP][2];  // unit length, q times D^-1/2: half pairs
  Decays pre, suf;                 // decay from the group's start through a token; behind a token to the group's end

  DEV Prepare(const PrepareParams& p, PrepareSmem& s) : p(p), s(s) {
    tid = threadIdx.x;
    ASSUME(tid >= 0 && tid < GROUPS * 32);
    lane = tid % 32, warp = shuffle(tid / 32, 0), row = lane / 4, pair = lane % 4, head = blockIdx.x;
    place = (int64_t)blockIdx.y * (int)gridDim.x + head;
    mine = s.operands + warp * PRIVATE_BYTES;
  }

  // --- which tokens -------------------------------------------------------------------------------------------------

  DEV void find_tokens() {
    int64_t chunk = blockIdx.y, begin = 0, end = 0;
    for (int base = 0; base < p.segments; base += 32) {
      const int i = base + lane;
      const int64_t from = i < p.segments ? p.offsets[i] : 0, to = i < p.segments ? p.offsets[i + 1] : 0;
      const int chunks = (int)((to - from + CHUNK - 1) / CHUNK);
      int through = chunks;
#pragma unroll
      for (int m = 1; m < 32; m *= 2) {
        const int other = shuffle_up(through, m);
        if (lane >= m) through += other;
      }
      const uint32_t past = lanes_where(through > chunk);
      if (past) {
        const int at = first_set(past);
        begin = shuffle(from, at) + (chunk - shuffle(through - chunks, at)) * CHUNK, end = shuffle(to, at);
        break;
      }
      chunk -= shuffle(through, 31);
    }
    first = begin + warp * GROUP;
    live = (int)(end - first < 0 ? 0 : end - first > GROUP ? GROUP : end - first);
  }

  // --- this warp's tokens -------------------------------------------------------------------------------------------

  DEV void load_rows() {
    const int r = lane / 16, piece = lane % 16;  // two rows at a time, 16 bytes a lane
    load_tensor(p.q, p.q_stride, shared_address(mine), r, piece);
    load_tensor(p.k, p.k_stride, shared_address(mine) + 2048, r, piece);
    load_tensor(p.f, p.f_stride, shared_address(mine) + 4096, r, piece);
  }
  DEV void load_tensor(const uint16_t* x, int64_t stride, uint32_t to, int r, int piece) const {
    const uint16_t* from = x + (first + r) * stride + head * D + piece * 8;
#pragma unroll
    for (int i = 0; i < GROUP; i += 2, from += 2 * stride)
      copy_async(to + wide_at(i + r, piece), from, i + r < live ? 16 : 0);
  }

  DEV void strengths() {
    if (lane >= GROUP) return;
    float beta = 0.f;
    if (lane < live) {
      const float logit = bf16_low(p.b[(first + lane) * p.b_stride + head]);
      beta = reciprocal_fast(1.f + exp2_fast(-LOG2_E * logit));
    }
    s.beta[warp * GROUP + lane] = beta;
    p.scales[place * SCALES + D + warp * GROUP + lane] = beta;
  }

  DEV void clear_squares() {  // own rows of T and R
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int at = warp * 1024 + (i * 32 + lane) * 16;
      *reinterpret_cast<uint4*>(s.T + at) = make_uint4(0, 0, 0, 0);
      *reinterpret_cast<uint4*>(s.R + at) = make_uint4(0, 0, 0, 0);
    }
  }

  // Rows to unit length. Squares and q.k are the diagonals of matrix products of the rows as they came.
  DEV void load_unit_rows() {
    float kq[4] = {}, qq[4] = {};
    const uint32_t from = shared_address(mine) + (lane / 8 % 2 ? 0 : 2048);  // matrices k, q, k, q
#pragma unroll
    for (int n = 0; n < 8; n++) {
      uint32_t x[4];
      load_matrices<4>(x, from + wide_at(lane % 8, 2 * n + lane / 16));
      mma_bf16(kq, x, x[0], x[2]);
      mma_bf16(qq, x, x[1], x[3]);
    }
    const bool odd = row & 1;  // the diagonal of row r lies in lane 4 r + r / 2
    const float k_norm = rsqrt_fast((odd ? kq[1] : kq[0]) + 1e-6f);
    const float q_norm = rsqrt_fast((odd ? qq[3] : qq[2]) + 1e-6f) * Q_SCALE;
    if (pair == row / 2) put_R(warp * GROUP + row, warp * GROUP + row, (odd ? kq[3] : kq[2]) * k_norm * q_norm);
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      unit(mine + 2048, i, shuffle(k_norm, 4 * i + i / 2), k[i]);
      unit(mine, i, shuffle(q_norm, 4 * i + i / 2), q[i]);
    }
  }
  DEV uint2 raw(const char* rows, int i) const {
    return *reinterpret_cast<const uint2*>(rows + wide_at(i, lane / 2) + lane % 2 * 8);
  }
  DEV void unit(const char* rows, int i, float norm, uint32_t (&x)[2]) const {
    const uint2 r = raw(rows, i);
    x[0] = pack_half(bf16_low(r.x) * norm, bf16_high(r.x) * norm);
    x[1] = pack_half(bf16_low(r.y) * norm, bf16_high(r.y) * norm);
  }
  DEV void put_R(int i, int j, float value) {
    *reinterpret_cast<uint16_t*>(s.R + square_at(i, j / 8) + j % 8 * 2) = (uint16_t)(pack_bf16(value, 0.f) & 0xffffu);
  }

  // The decay of every token: a factor, never a logarithm, from here on.
  DEV void load_decays() {
    const float rate = exp2_fast(p.a_log[head] * LOG2_E);
    const float4 dt4 = *reinterpret_cast<const float4*>(p.dt_bias + head * D + lane * 4);
    const float dt[4] = {dt4.x, dt4.y, dt4.z, dt4.w};
    const bool bounded = p.bound < 0.f;
    const float slope = LOG2_E * (bounded ? -rate : 1.f), top = bounded ? p.bound * LOG2_E : -rate;
    float shift[4];
#pragma unroll
    for (int c = 0; c < 4; c++) shift[c] = slope * dt[c];
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      const uint2 r = raw(mine + 4096, i);
      const float f[4] = {bf16_low(r.x), bf16_high(r.x), bf16_low(r.y), bf16_high(r.y)};
#pragma unroll
      for (int c = 0; c < 4; c++) pre[i][c] = fmaf(f[c], slope, shift[c]);
    }
    if (bounded) {
#pragma unroll
      for (int i = 0; i < GROUP; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) pre[i][c] = exp2_fast(top * reciprocal_fast(1.f + exp2_fast(pre[i][c])));
    } else {
#pragma unroll
      for (int i = 0; i < GROUP; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
          const float zeta = pre[i][c];
          pre[i][c] = exp2_fast(top * (zeta > 28.f ? zeta : log2_fast(1.f + exp2_fast(zeta))));
        }
    }
    if (live < GROUP) {
#pragma unroll
      for (int i = 0; i < GROUP; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) pre[i][c] = i < live ? pre[i][c] : 1.f;
    }
  }

  // --- levels 1, 2 and 4 --------------------------------------------------------------------------------------------

  DEV void put_row(char* rows, int r, const uint32_t (&x)[2]) const {
    *reinterpret_cast<uint2*>(rows + wide_at(r, lane / 2) + lane % 2 * 8) = make_uint2(x[0], x[1]);
  }
  DEV void put_row(char* rows, int r, const uint32_t (&x)[2], const float (&decay)[4]) const {
    const uint32_t y[2] = {multiply_half(x[0], pack_half(decay[0], decay[1])),
                           multiply_half(x[1], pack_half(decay[2], decay[3]))};
    put_row(rows, r, y);
  }

  // pre and suf from blocks of Z tokens to blocks of 2 Z
  template <int Z>
  DEV void widen() {
#pragma unroll
    for (int at = 0; at < GROUP; at += 2 * Z)
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const float left = pre[at + Z - 1][c], right = pre[at + 2 * Z - 1][c];
#pragma unroll
        for (int i = 0; i < Z; i++) {
          suf[at + i][c] = i == Z - 1 ? right : suf[at + i][c] * right;
          pre[at + Z + i][c] *= left;
        }
      }
  }

  // Operands in this warp's own memory, as rows of 128 channels: at 0 the right tokens of levels 4 and 2 (k, then q),
  // at 16 their left tokens (k); at 24 the right tokens of level 1 (k, then q), at 32 its left ones.
  DEV void put_near() {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      put_row(mine, 24 + i, k[2 * i + 1], pre[2 * i + 1]);
      put_row(mine, 28 + i, q[2 * i + 1], pre[2 * i + 1]);
      put_row(mine, 32 + i, k[2 * i]);
    }
    widen<1>();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int right = i / 2 * 4 + 2 + i % 2, left = i / 2 * 4 + i % 2;
      put_row(mine, 4 + i, k[right], pre[right]);
      put_row(mine, 12 + i, q[right], pre[right]);
      if (i % 2) put_row(mine, 20 + i, k[left]);  // the last of its half
      else put_row(mine, 20 + i, k[left], suf[left]);
    }
    widen<2>();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      put_row(mine, i, k[4 + i], pre[4 + i]);
      put_row(mine, 8 + i, q[4 + i], pre[4 + i]);
      if (i == 3) put_row(mine, 16 + i, k[i]);
      else put_row(mine, 16 + i, k[i], suf[i]);
    }
    widen<4>();
  }

  DEV void near_products() {
    float c[4] = {}, c1[4] = {};
    const uint32_t at = shared_address(mine);
    const int m = lane / 8, r = lane % 8;
#pragma unroll
    for (int n = 0; n < 8; n++) {
      uint32_t a[4], b[4];
      load_matrices<4>(a, at + wide_at(m % 2 * 8 + r, 2 * n + m / 2));
      load_matrices<4>(b, at + wide_at(m < 2 ? 16 + r : 32 + r % 4, 2 * n + m % 2));
      mma_f16(c, a, b[0], b[1]);
      load_matrices<4>(a, at + wide_at(24 + m % 2 * 4 + r % 4, 2 * n + m / 2));
      mma_f16(c1, a, b[2], b[3]);
    }
    // of c the first four rows and columns are level 4, and of the last four the two diagonal 2 x 2 blocks level 2
    const bool far = row < 4;
    const int i = far ? 4 + row : (row - 4) / 2 * 4 + 2 + row % 2, j = far ? 2 * pair : 4 * pair - 8;
    if (far ? pair < 2 : pair - 2 == (row - 4) / 2) {
      const float beta = s.beta[warp * GROUP + i];
      *reinterpret_cast<float2*>(&s.near[warp][i][j]) = make_float2(c[0] * beta, c[1] * beta);
      *reinterpret_cast<uint32_t*>(s.R + square_at(warp * GROUP + i, warp) + j * 2) = pack_bf16(c[2], c[3]);
    }
    if (far && pair == row / 2) {  // of c1 the diagonal is level 1
      s.near[warp][2 * row + 1][2 * row] = (row % 2 ? c1[1] : c1[0]) * s.beta[warp * GROUP + 2 * row + 1];
      put_R(warp * GROUP + 2 * row + 1, warp * GROUP + 2 * row, row % 2 ? c1[3] : c1[2]);
    }
  }

  DEV void put_T(int i, int j, float value) {
    *reinterpret_cast<uint16_t*>(s.T + square_at(i, j / 8) + j % 8 * 2) = half_bits(value);
  }

  // (I + A)^-1 within the group, row by row, each rounded before the next uses it; a lane holds a column.
  DEV void invert_near() {
    const int column = lane % GROUP;
    float t[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      const float4* const A = reinterpret_cast<const float4*>(s.near[warp][i]);
      float sum = i == column ? 1.f : 0.f;
#pragma unroll
      for (int m = 0; m < i; m += 4) {
        const float4 a = A[m / 4];
        sum = fmaf(-a.x, t[m], sum);
        if (m + 1 < i) sum = fmaf(-a.y, t[m + 1], sum);
        if (m + 2 < i) sum = fmaf(-a.z, t[m + 2], sum);
        if (m + 3 < i) sum = fmaf(-a.w, t[m + 3], sum);
      }
      t[i] = round_bf16(sum);
    }
    if (lane < GROUP)
#pragma unroll
      for (int i = 0; i < GROUP; i++) put_T(warp * GROUP + i, warp * GROUP + column, t[i]);
  }

  // --- levels 8, 16 and 32, and what leaves for the second kernel ---------------------------------------------------

  struct Span {  // product of the decays over groups
    float x[4] = {1.f, 1.f, 1.f, 1.f};
  };
  DEV Span span(int from, int to) const {
    Span span;
#pragma unroll 1
    for (int g = from; g < to; g++) {
      const float4 t = *reinterpret_cast<const float4*>(&s.total[g][lane * 4]);
      span.x[0] *= t.x, span.x[1] *= t.y, span.x[2] *= t.z, span.x[3] *= t.w;
    }
    return span;
  }
  DEV void put_total() {
    float4* const to = reinterpret_cast<float4*>(&s.total[warp][lane * 4]);
    *to = make_float4(pre[7][0], pre[7][1], pre[7][2], pre[7][3]);
  }

  DEV char* level_rows(int level) const { return s.operands + level * LEVEL_BYTES; }
  // q exists for the groups in right halves, in order
  static DEV int q_row(int level, int group) {
    return 64 + GROUP * (level == 0 ? group / 2 : level == 1 ? group / 4 * 2 + group % 2 : group - 4);
  }

  // Level 0, 1, 2 is half length 8, 16, 32: half length in groups is 1 << level.
  template <int LEVEL>
  DEV void put_far() {
    char* const rows = level_rows(LEVEL);
    const int half = 1 << LEVEL, block = warp & ~(2 * half - 1);
    const bool right = warp & half;
    if (right) {
      const Span left = span(block + half, warp);
#pragma unroll
      for (int i = 0; i < GROUP; i++) {
        float decay[4];
#pragma unroll
        for (int c = 0; c < 4; c++) decay[c] = LEVEL == 0 ? pre[i][c] : pre[i][c] * left.x[c];
        put_row(rows, warp * GROUP + i, k[i], decay);
        put_row(rows, q_row(LEVEL, warp) + i, q[i], decay);
      }
    } else {
      const Span rest = span(warp + 1, block + half);
#pragma unroll
      for (int i = 0; i < GROUP; i++) {
        float decay[4];
#pragma unroll
        for (int c = 0; c < 4; c++) {
          const float own = i == GROUP - 1 ? 1.f : suf[i][c];
          decay[c] = LEVEL == 0 ? own : own * rest.x[c];
        }
        put_row(rows, warp * GROUP + i, k[i], decay);
      }
    }
  }

  static DEV uint2 scaled(const uint32_t (&x)[2], const float (&decay)[4]) {
    const float2 a = unpack_half(x[0]), b = unpack_half(x[1]);
    return make_uint2(pack_bf16(a.x * decay[0], a.y * decay[1]), pack_bf16(b.x * decay[2], b.y * decay[3]));
  }

  DEV void store_outer() {
    const Span left = span(0, warp), rest = span(warp + 1, GROUPS);
    uint16_t* const to = p.tiles + place * PLACE + warp * GROUP * D + lane * 4;
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      float in[4], out[4];
#pragma unroll
      for (int c = 0; c < 4; c++) {
        in[c] = pre[i][c] * left.x[c];
        out[c] = i == GROUP - 1 ? rest.x[c] : suf[i][c] * rest.x[c];
      }
      *reinterpret_cast<uint2*>(to + i * D) = scaled(k[i], in);
      *reinterpret_cast<uint2*>(to + CHUNK * D + i * D) = scaled(q[i], in);
      *reinterpret_cast<uint2*>(to + 2 * CHUNK * D + i * D) = scaled(k[i], out);
      if (warp == GROUPS - 1 && i == GROUP - 1)
        *reinterpret_cast<float4*>(p.scales + place * SCALES + lane * 4) = make_float4(in[0], in[1], in[2], in[3]);
    }
  }

  // Groups `right` against N groups from `left` on: A in c[n][0..1], R in c[n][2..3].
  template <int N>
  DEV void far_products(int level, int right, int left, float (&c)[N][4]) const {
    const uint32_t at = shared_address(level_rows(level));
    const int m = lane / 8, r = lane % 8, own = (m % 2 ? q_row(level, right) : right * GROUP) + r;
    uint32_t a[4], b[4];
#pragma unroll
    for (int j = 0; j < N; j++) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0.f;
#pragma unroll
    for (int n = 0; n < 8; n++) {
      load_matrices<4>(a, at + wide_at(own, 2 * n + m / 2));
      if constexpr (N == 1) {  // one load serves two steps
        if (n % 2 == 0) load_matrices<4>(b, at + wide_at(left * GROUP + r, 2 * n + m));
        mma_f16(c[0], a, b[n % 2 * 2], b[n % 2 * 2 + 1]);
      } else {
#pragma unroll
        for (int j = 0; j < N; j += 2) {
          load_matrices<4>(b, at + wide_at((left + j + m / 2) * GROUP + r, 2 * n + m % 2));
          mma_f16(c[j], a, b[0], b[1]);
          mma_f16(c[j + 1], a, b[2], b[3]);
        }
      }
    }
  }

  DEV float beta_of(int group) const { return s.beta[group * GROUP + row]; }

  template <int N>
  DEV void far(int level, int right, int left) {
    float c[N][4];
    far_products<N>(level, right, left, c);
    const float beta = beta_of(right);
#pragma unroll
    for (int j = 0; j < N; j++) {
      const int at = square_at(right * GROUP + row, left + j) + pair * 4;
      *reinterpret_cast<uint32_t*>(s.A + at) = pack_half(c[j][0] * beta, c[j][1] * beta);
      *reinterpret_cast<uint32_t*>(s.R + at) = pack_bf16(c[j][2], c[j][3]);
    }
  }

  // Minus the values, rounded to bf16, into T: rows of `group`, columns of `column_group`.
  DEV void put_block(int group, int column_group, float x, float y) {
    *reinterpret_cast<uint32_t*>(s.T + square_at(group * GROUP + row, column_group) + pair * 4) =
        pack_half(-round_bf16(x), -round_bf16(y));
  }

  // Level 8: A, R and, as all it needs is there, T_21 = -T_22 (A_21 T_11).
  DEV void far_and_invert(int right, int left) {
    float c[1][4], x[4] = {};
    far_products<1>(0, right, left, c);
    const float beta = beta_of(right);
    *reinterpret_cast<uint32_t*>(s.R + square_at(right * GROUP + row, left) + pair * 4) = pack_bf16(c[0][2], c[0][3]);
    uint32_t T11[1], T22[1];
    load_matrices<1, true>(T11, shared_address(s.T) + square_at(left * GROUP + lane % 8, left));
    load_matrices<1>(T22, shared_address(s.T) + square_at(right * GROUP + lane % 8, right));
    const uint32_t A21[4] = {pack_half(c[0][0] * beta, c[0][1] * beta), 0, 0, 0};
    mma_f16(x, A21, T11[0], 0);
    const uint32_t T22_wide[4] = {T22[0], 0, 0, 0};
    float y[4] = {};
    mma_f16(y, T22_wide, transpose_8x8(pack_half(x[0], x[1])), 0);
    put_block(right, left, y[0], y[1]);
  }

  DEV void all_far_products() {
    if (warp < 4) return far<4>(2, 7 - warp, 0);
    const int right_8 = 15 - 2 * warp, right_16 = warp < 6 ? 11 - warp : 9 - warp;  // 7 5 3 1 and 7 6 3 2
    far<2>(1, right_16, right_16 & 4);
    far_and_invert(right_8, right_8 - 1);
  }

  // 16 x 16 of a square tile as left operand
  DEV void load_left(uint32_t (&a)[4], const char* square, int group, int column_group) const {
    load_matrices<4>(a, shared_address(square) + square_at(group * GROUP + lane % 16, column_group + lane / 16));
  }

  // T_21 of half length 16, 8 columns a warp
  DEV void invert_16(int block, int column) {
    const int g = block * 4;
    float x[4] = {}, y[4] = {};
    uint32_t a[4], b[2];
    load_left(a, s.A, g + 2, g);
    load_matrices<2, true>(b, shared_address(s.T) + square_at(g * GROUP + lane % 16, g + column));
    mma_f16(x, a, b[0], b[1]);
    load_left(a, s.T, g + 2, g + 2);
    mma_f16(y, a, transpose_8x8(pack_half(x[0], x[1])), transpose_8x8(pack_half(x[2], x[3])));
    put_block(g + 2, g + column, y[0], y[1]);
    put_block(g + 3, g + column, y[2], y[3]);
  }

  // T_21 of half length 32, 8 columns a warp
  DEV void invert_32(int column) {
    uint32_t b[4], product[2][2];
    load_matrices<4, true>(b, shared_address(s.T) + square_at(lane, column));
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float x[4] = {};
#pragma unroll
      for (int m = 0; m < 2; m++) {
        uint32_t a[4];
        load_left(a, s.A, 4 + 2 * i, 2 * m);
        mma_f16(x, a, b[2 * m], b[2 * m + 1]);
      }
      product[i][0] = transpose_8x8(pack_half(x[0], x[1])), product[i][1] = transpose_8x8(pack_half(x[2], x[3]));
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float y[4] = {};
#pragma unroll
      for (int m = 0; m <= i; m++) {
        uint32_t a[4];
        load_left(a, s.T, 4 + 2 * i, 4 + 2 * m);
        mma_f16(y, a, product[m][0], product[m][1]);
      }
      put_block(4 + 2 * i, column, y[0], y[1]);
      put_block(5 + 2 * i, column, y[2], y[3]);
    }
  }

  static DEV uint32_t half_to_bf16(uint32_t pair) {
    const float2 x = unpack_half(pair);
    return pack_bf16(x.x, x.y);
  }

  // `threads` threads from `from` on store a square tile.
  DEV void store_square(const char* square, int offset, int from, int threads, bool halves) const {
    for (int i = tid - from; i < CHUNK * 8; i += threads) {
      uint4 x = *reinterpret_cast<const uint4*>(square + square_at(i / 8, i % 8));
      if (halves) x = make_uint4(half_to_bf16(x.x), half_to_bf16(x.y), half_to_bf16(x.z), half_to_bf16(x.w));
      *reinterpret_cast<uint4*>(p.tiles + place * PLACE + offset + i * 8) = x;
    }
  }

  DEV void run() {
    launch_dependents();  // they wait for the end of this grid
    find_tokens();
    load_rows();
    clear_squares();
    strengths();
    copies_done();
    __syncwarp();
    load_unit_rows();
    load_decays();
    __syncwarp();  // all lanes have read the rows that the operands now replace
    put_near();
    put_total();
    __syncwarp();
    near_products();
    __syncthreads();  // totals are there, and nobody reads his own operands any more
    put_far<0>();
    put_far<1>();
    put_far<2>();
    invert_near();
    store_outer();
    __syncthreads();
    all_far_products();
    __syncthreads();
    if (warp < 4) invert_16(warp / 2, warp % 2);
    else store_square(s.R, 3 * CHUNK * D + CHUNK * CHUNK, 128, 128, false);
    __syncthreads();
    if (warp < 4) invert_32(warp);
    __syncthreads();
    store_square(s.T, 3 * CHUNK * D, 0, GROUPS * 32, true);
  }
};

__global__ void __launch_bounds__(GROUPS * 32, 2) kda_prepare_kernel(const __grid_constant__ PrepareParams p) {
  Prepare(p, smem_base<PrepareSmem>()).run();
}
