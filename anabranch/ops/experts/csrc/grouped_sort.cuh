// Sorts (token, choice) pairs by expert and cuts the runs into tiles, in one launch: those of ops/experts/tiles.py, but
// a run's tiles are about as large as each other, and the largest tiles come first.
//
// One cluster. Each CTA ranks its share of the pairs by counting in shared memory; what lower CTAs counted and the runs
// of lower experts say where a pair goes. The order inside a run is whatever the atomics give. Programs that take every
// n-th tile of a falling order end within one tile of each other, however uneven the experts are. Another launch writes
// rows in the order of places.
#pragma once

constexpr int SORT_CTAS = 8, SORT_THREADS = 1024, SORT_AHEAD = 8;  // pairs that a thread asks for at once
constexpr int SORT_EXPERTS = 512, SORT_SHARE = SORT_EXPERTS / SORT_CTAS;  // most experts; whose tiles a CTA writes
constexpr int SORT_LANES = SORT_THREADS / SORT_SHARE;                     // threads for the tiles of one expert
constexpr int SORT_UNIT = 32, SORT_MANY = 1 << 14;  // pairs a tile's size is a multiple of; above all tiles there are

struct SortParams {
  const int64_t* experts;  // [pairs], global indices
  int *places, *table;     // [pairs] and [3, slots]: expert, first and stop of each tile
  int pairs, first, count, slots, tile, tail;
};

struct SortSmem {
  int counts[SORT_EXPERTS], starts[SORT_EXPERTS], sums[SORT_THREADS / 32];
  int runs[SORT_EXPERTS], firsts[SORT_EXPERTS];
  int sizes[SORT_EXPERTS];  // of each expert: units of its largest tile x SORT_MANY + tiles
};

struct Sort {
  const SortParams& p;
  SortSmem& s;
  int tid, lane, warp, rank;

  DEV Sort(const SortParams& p, SortSmem& s) : p(p), s(s) {
    tid = threadIdx.x, lane = tid % 32, warp = tid / 32, rank = blockIdx.x;
  }

  // The sum over the threads before this one.
  DEV int prefix(int x) const {
    int through = x;
#pragma unroll
    for (int m = 1; m < 32; m *= 2) {
      const int other = shuffle_up(through, m);
      if (lane >= m) through += other;
    }
    if (lane == 31) s.sums[warp] = through;
    __syncthreads();
    int before = through - x;
#pragma unroll
    for (int w = 0; w < SORT_EXPERTS / 32; w++)
      if (w < warp) before += s.sums[w];
    return before;
  }

  DEV int tiles_of(int run) const { return run == 0 ? 0 : max((run - p.tail + p.tile - 1) / p.tile, 1); }
  DEV int units_of(int run) const { return (run + SORT_UNIT - 1) / SORT_UNIT; }

  // The table's entries of this CTA's experts, each behind those of experts with larger tiles.
  DEV void write_tiles() const {
    const int expert = rank * SORT_SHARE + tid / SORT_LANES, part = tid % SORT_LANES, mine = s.sizes[expert];
    int before = 0, all = 0;
    for (int e = part; e < SORT_EXPERTS; e += SORT_LANES) {
      const int size = s.sizes[e], larger = size / SORT_MANY - mine / SORT_MANY;
      before += larger > 0 || (larger == 0 && e < expert) ? size % SORT_MANY : 0, all += size % SORT_MANY;
    }
#pragma unroll
    for (int m = 1; m < SORT_LANES; m *= 2) before += shuffle_xor(before, m), all += shuffle_xor(all, m);
    const int tiles = mine % SORT_MANY, first = s.firsts[expert], units = units_of(s.runs[expert]);
    const int low = units / max(tiles, 1), more = units - low * tiles;
    for (int j = part; j < tiles; j += SORT_LANES) {
      int* const entry = p.table + before + j;
      entry[0] = expert, entry[p.slots] = first + (low * j + min(j, more)) * SORT_UNIT;
      entry[2 * p.slots] = first + min((low * (j + 1) + min(j + 1, more)) * SORT_UNIT, s.runs[expert]);
    }
    for (int i = all + rank * SORT_THREADS + tid; i < p.slots; i += SORT_CTAS * SORT_THREADS) p.table[i] = -1;
  }

  // use(pair, expert) of this CTA's pairs; expert -1: another device's
  template <class Use>
  DEV void each_pair(Use use) const {
    const int share = (p.pairs + SORT_CTAS - 1) / SORT_CTAS, begin = rank * share, end = min(begin + share, p.pairs);
    for (int from = begin + tid; from < end; from += SORT_AHEAD * SORT_THREADS) {
      int expert[SORT_AHEAD];
#pragma unroll
      for (int i = 0; i < SORT_AHEAD; i++) {
        const int pair = from + i * SORT_THREADS;
        const int64_t e = pair < end ? p.experts[pair] - p.first : -1;
        expert[i] = e >= 0 && e < p.count ? (int)e : -1;
      }
#pragma unroll
      for (int i = 0; i < SORT_AHEAD; i++)
        if (from + i * SORT_THREADS < end) use(from + i * SORT_THREADS, expert[i]);
    }
  }

  DEV void run() {
    if (tid < SORT_EXPERTS) s.counts[tid] = 0;
    __syncthreads();
    wait_for_previous();
    if (tid == 0) launch_dependents();
    each_pair([&](int pair, int expert) { p.places[pair] = expert < 0 ? -1 : atomicAdd(&s.counts[expert], 1); });
    cluster_arrive();
    cluster_wait();
    int run = 0, lower = 0;
    if (tid < SORT_EXPERTS)
#pragma unroll
      for (int c = 0; c < SORT_CTAS; c++) {
        const int counted = load_peer(&s.counts[tid], c);
        run += counted;
        if (c < rank) lower += counted;
      }
    cluster_arrive();  // the peers' counts are read
    const int first = prefix(run);
    if (tid < SORT_EXPERTS) {
      const int tiles = tiles_of(run);
      s.starts[tid] = first + lower, s.runs[tid] = run, s.firsts[tid] = first;
      s.sizes[tid] = (units_of(run) + tiles - 1) / max(tiles, 1) * SORT_MANY + tiles;
    }
    __syncthreads();
    each_pair([&](int pair, int expert) { if (expert >= 0) p.places[pair] += s.starts[expert]; });
    write_tiles();
    cluster_wait();  // and so are this one's
  }
};

__global__ void __launch_bounds__(SORT_THREADS, 1) sort_kernel(const __grid_constant__ SortParams p) {
  Sort(p, smem_base<SortSmem>()).run();
}

// Rows of x [T, K] in the order of the pairs in tiles: a block reads a token's row and writes it to each pair's place.
struct SpreadParams {
  const uint16_t* x;
  const int* places;  // [T * top_k], -1: in no tile
  int* order;         // [P]: the pair at each place
  uint16_t* out;      // [P, K]
  int columns, top_k;
  int64_t x_stride;
};

constexpr int SPREAD_THREADS = 96, AHEAD = 3;  // pieces of 16 bytes that a thread holds at once

__global__ void __launch_bounds__(SPREAD_THREADS) spread_kernel(const __grid_constant__ SpreadParams p) {
  wait_for_previous();
  launch_dependents();
  const int tid = threadIdx.x, pieces = p.columns / 8, first_pair = blockIdx.x * p.top_k;
  const int* const places = p.places + first_pair;
  const uint4* const from = reinterpret_cast<const uint4*>(p.x + blockIdx.x * p.x_stride);
  for (int first = tid; first < pieces; first += AHEAD * SPREAD_THREADS) {
    uint4 held[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
      if (first + i * SPREAD_THREADS < pieces) held[i] = from[first + i * SPREAD_THREADS];
    for (int j = 0; j < p.top_k; j++) {
      const int place = places[j];
      if (place < 0) continue;
      uint4* const to = reinterpret_cast<uint4*>(p.out + (int64_t)place * p.columns);
#pragma unroll
      for (int i = 0; i < AHEAD; i++)
        if (first + i * SPREAD_THREADS < pieces) to[first + i * SPREAD_THREADS] = held[i];
    }
  }
  for (int j = tid; j < p.top_k; j += SPREAD_THREADS)
    if (places[j] >= 0) p.order[places[j]] = first_pair + j;
}
