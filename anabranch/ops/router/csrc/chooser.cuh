// A warp that chooses for one token, as soon as all of its scores are there. See router.cuh.
#pragma once
#include "worker.cuh"

constexpr int MOST_CHOICES = 32;

// Room for the candidates of one token among up to MOST experts.
template <int MOST>
struct Candidates {
  uint4 one[MOST];  // ~expert, order: as 64 bits they grow as a sort has them, the lower index first; score
  uint32_t best[32];
  float won[MOST_CHOICES];
  int expert[MOST_CHOICES];
};

template <int MOST>
struct Chooser {
  static constexpr int PAIRS = MOST / 64;  // of experts of a lane
  const RouteParams& p;
  Candidates<MOST>& c;
  const int token;
  Mail mail[PAIRS];

  DEV Chooser(const RouteParams& p, Candidates<MOST>& c, int token) : p(p), c(c), token(token) {}

  DEV int expert(int i) const { return (i / 2 * 32 + lane_id()) * 2 + i % 2; }
  DEV uint64_t word(int i) const { return i % 2 ? mail[i / 2].b : mail[i / 2].a; }
  DEV uint32_t order(int i) const { return (uint32_t)(word(i) >> 32); }

  // Waits for the words and empties the box.
  DEV void receive() {
    uint64_t* box = p.mail + token * p.pitch;
    for (bool all = false; !all;) {
      all = true;
#pragma unroll
      for (int i = 0; i < PAIRS; i++) {
        mail[i] = Mail{0, 0};
        if (expert(2 * i) >= p.experts) continue;
        mail[i] = read_mail(box + expert(2 * i));
        all &= order(2 * i) && order(2 * i + 1);
      }
    }
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
      if (expert(2 * i) < p.experts) clear_mail(box + expert(2 * i));
  }

  // The top_k-th of the lanes' best ones: as many experts are no worse, so nothing below it can win.
  DEV uint32_t threshold() {
    uint32_t best = order(0);
#pragma unroll
    for (int i = 1; i < 2 * PAIRS; i++) best = order(i) > best ? order(i) : best;
    c.best[lane_id()] = best;
    warp_barrier();
    int below = 0;
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
      const uint4 other = *reinterpret_cast<const uint4*>(c.best + i);
      below += (minus_greater(other.x, best) + minus_greater(other.y, best)) +
               (minus_greater(other.z, best) + minus_greater(other.w, best));
    }
    const uint32_t found = least(below > -p.top_k ? best : ~0u);
    return found > NOBODY ? found : NOBODY + 1;
  }

  // How many candidates there are: at least top_k.
  DEV int gather(uint32_t from) {
    int count = 0;
    const uint32_t before = (1u << lane_id()) - 1;
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; i++) {
      const bool in = order(i) >= from;
      const uint32_t lanes = lanes_where(in);
      store_if(in, c.one + count + set_bits(lanes & before), make_uint4(~expert(i), order(i), (uint32_t)word(i), 0));
      count += set_bits(lanes);
    }
    warp_barrier();
    return count;
  }

  // A candidate's place is the number of those above it.
  DEV void rank(int count) {
    for (int n = lane_id(); n < count; n += 32) {
      const uint4 mine = c.one[n];
      int below = 0;
#pragma unroll 4
      for (int i = 0; i < count; i++) {
        const uint2 other = *reinterpret_cast<const uint2*>(c.one + i);
        below += minus_greater((uint64_t)other.y << 32 | other.x, (uint64_t)mine.y << 32 | mine.x);
      }
      if (below > -p.top_k) c.expert[-below] = (int)~mine.x, c.won[-below] = __uint_as_float(mine.z);
    }
    warp_barrier();
  }

  DEV void run() {
    wait_for_previous();
    launch_dependents();
    receive();
    rank(gather(threshold()));
    float sum = 0.f;
#pragma unroll 8
    for (int i = 0; i < p.top_k; i++) sum += c.won[i];
    if (lane_id() >= p.top_k) return;
    const float won = c.won[lane_id()], weight = p.renormalize ? __fdividef(won, sum + 1e-20f) : won;
    const int at = token * p.top_k + lane_id();
    store_choice(p.weights + at, weight * p.scaling), store_choice(p.chosen + at, (int64_t)c.expert[lane_id()]);
  }
};
