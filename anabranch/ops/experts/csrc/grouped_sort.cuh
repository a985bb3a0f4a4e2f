// Sorts (token, choice) pairs by expert and cuts the runs into tiles, as ops/experts/tiles.py does, in one launch.
//
// One cluster. Each CTA ranks its share of the pairs by counting in shared memory; what lower CTAs counted and the runs
// of lower experts say where a pair goes. The order inside a run is whatever the atomics give.
#pragma once

constexpr int SORT_CTAS = 8, SORT_THREADS = 512, SORT_MOST = 32;  // pairs of a thread
constexpr int SORT_EXPERTS = SORT_THREADS;                        // a thread adds up one expert

struct SortParams {
  const int64_t* experts;  // [pairs], global indices
  int *order, *table;      // [pairs] and [3, slots]: expert, first and stop of each tile
  int pairs, first, count, slots, tile, tail;
};

struct SortSmem {
  int counts[SORT_EXPERTS], starts[SORT_EXPERTS], sums[2][SORT_THREADS / 32];
};

struct Sort {
  struct Prefix {
    int before, all;
  };

  const SortParams& p;
  SortSmem& s;
  int tid, lane, warp, rank;

  DEV Sort(const SortParams& p, SortSmem& s) : p(p), s(s) {
    tid = threadIdx.x, lane = tid % 32, warp = tid / 32, rank = blockIdx.x;
  }

  // Sums over the threads before this one, and over all.
  DEV Prefix prefix(int x, int (&sums)[SORT_THREADS / 32]) const {
    int through = x;
#pragma unroll
    for (int m = 1; m < 32; m *= 2) {
      const int other = shuffle_up(through, m);
      if (lane >= m) through += other;
    }
    if (lane == 31) sums[warp] = through;
    __syncthreads();
    Prefix sum{through - x, 0};
#pragma unroll
    for (int w = 0; w < SORT_THREADS / 32; w++) {
      if (w < warp) sum.before += sums[w];
      sum.all += sums[w];
    }
    return sum;
  }

  DEV void tiles(int run, int first) {
    const int tiles = run == 0 ? 0 : max((run - p.tail + p.tile - 1) / p.tile, 1);
    const Prefix at = prefix(tiles, s.sums[1]);
    if (rank != 0) return;
    for (int j = 0; j < tiles; j++) {
      int* const entry = p.table + at.before + j;
      entry[0] = tid, entry[p.slots] = first + j * p.tile;
      entry[2 * p.slots] = j + 1 < tiles ? first + (j + 1) * p.tile : first + run;
    }
    for (int i = at.all + tid; i < p.slots; i += SORT_THREADS) p.table[i] = -1;
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
    const int first = prefix(run, s.sums[0]).before;
    s.starts[tid] = first + lower;
    tiles(run, first);  // which meets the block
#pragma unroll
    for (int i = 0; i < SORT_MOST; i++)
      if (kept[i] >= 0) p.order[s.starts[kept[i] % SORT_EXPERTS] + kept[i] / SORT_EXPERTS] = begin + i * SORT_THREADS + tid;
    cluster_wait();  // and so are this one's
  }
};

__global__ void __launch_bounds__(SORT_THREADS, 1) sort_kernel(const __grid_constant__ SortParams p) {
  Sort(p, smem_base<SortSmem>()).run();
}
