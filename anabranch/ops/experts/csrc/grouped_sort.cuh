// Sorts (token, choice) pairs by expert and cuts the runs into tiles, in one launch: those of ops/experts/tiles.py, but
// a run's tiles are about as large as each other, and the largest tiles come first.
//
// One cluster. Each CTA ranks its share of the pairs by counting in shared memory; what lower CTAs counted and the runs
// of lower experts say where a pair goes. The order inside a run is whatever the atomics give. Programs that take every
// n-th tile of a falling order end within one tile of each other, however uneven the experts are.
#pragma once

constexpr int SORT_CTAS = 8, SORT_THREADS = 512, SORT_MOST = 32;  // pairs of a thread
constexpr int SORT_EXPERTS = SORT_THREADS;                        // a thread adds up one expert
constexpr int SORT_UNIT = 32, SORT_MANY = 1 << 14;                // pairs computed together; above all tiles there are

struct SortParams {
  const int64_t* experts;  // [pairs], global indices
  int *order, *table;      // [pairs] and [3, slots]: expert, first and stop of each tile
  int pairs, first, count, slots, tile, tail;
};

struct SortSmem {
  int counts[SORT_EXPERTS], starts[SORT_EXPERTS], sums[SORT_THREADS / 32];
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
    for (int w = 0; w < SORT_THREADS / 32; w++)
      if (w < warp) before += s.sums[w];
    return before;
  }

  // The tiles of this thread's expert, behind those of experts with larger ones.
  DEV void tiles(int run, int first) {
    const int tiles = run == 0 ? 0 : max((run - p.tail + p.tile - 1) / p.tile, 1);
    const int units = (run + SORT_UNIT - 1) / SORT_UNIT, low = units / max(tiles, 1), more = units - low * tiles;
    const int largest = low + (more > 0);
    s.sizes[tid] = largest * SORT_MANY + tiles;
    __syncthreads();
    if (rank != 0) return;
    int before = 0, all = 0;
    for (int e = 0; e < p.count; e++) {
      const int other = s.sizes[e] / SORT_MANY, many = s.sizes[e] % SORT_MANY;
      before += other > largest || (other == largest && e < tid) ? many : 0, all += many;
    }
    for (int j = 0, at = first; j < tiles; j++) {
      int* const entry = p.table + before + j;
      entry[0] = tid, entry[p.slots] = at, at = min(at + (low + (j < more)) * SORT_UNIT, first + run);
      entry[2 * p.slots] = at;
    }
    for (int i = all + tid; i < p.slots; i += SORT_THREADS) p.table[i] = -1;
  }

  DEV void run() {
    s.counts[tid] = 0;
    __syncthreads();
    wait_for_previous();
    if (tid == 0) launch_dependents();
    const int share = (p.pairs + SORT_CTAS - 1) / SORT_CTAS, begin = rank * share, end = min(begin + share, p.pairs);
    int kept[SORT_MOST];  // expert, then with the rank behind it; -1: another device's
#pragma unroll
    for (int i = 0; i < SORT_MOST; i++) {
      const int pair = begin + i * SORT_THREADS + tid;
      const int64_t expert = pair < end ? p.experts[pair] - p.first : -1;
      kept[i] = expert >= 0 && expert < p.count ? (int)expert : -1;
    }
#pragma unroll
    for (int i = 0; i < SORT_MOST; i++)
      if (kept[i] >= 0) kept[i] += atomicAdd(&s.counts[kept[i]], 1) * SORT_EXPERTS;
    cluster_arrive();
    cluster_wait();
    int run = 0, lower = 0;
#pragma unroll
    for (int c = 0; c < SORT_CTAS; c++) {
      const int counted = load_peer(&s.counts[tid], c);
      run += counted;
      if (c < rank) lower += counted;
    }
    cluster_arrive();  // the peers' counts are read
    const int first = prefix(run);
    s.starts[tid] = first + lower;
    tiles(run, first);  // where the block meets
#pragma unroll
    for (int i = 0; i < SORT_MOST; i++)
      if (kept[i] >= 0) p.order[s.starts[kept[i] % SORT_EXPERTS] + kept[i] / SORT_EXPERTS] = begin + i * SORT_THREADS + tid;
    cluster_wait();  // and so are this one's
  }
};

__global__ void __launch_bounds__(SORT_THREADS, 1) sort_kernel(const __grid_constant__ SortParams p) {
  Sort(p, smem_base<SortSmem>()).run();
}
