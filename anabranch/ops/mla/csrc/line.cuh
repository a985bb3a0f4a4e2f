// The cache pages of all requests in one line, of which every program takes an equal share; see balanced.py.
#pragma once
#ifdef ANABRANCH_EMULATE
#include "hopper.h"
#else
#include "mla_ptx.cuh"
#endif

constexpr int RANK = 512, ROPE = 64, WIDTH = RANK + ROPE, PAGE = 64;
constexpr int ROW_BYTES = WIDTH * 2, PITCH = ROW_BYTES + 16;  // 73 x 16: eight rows meet in no bank

// Whole warps ask; every lane gets the answer.
struct Line {
  const int64_t* totals;  // [requests]
  int64_t stride;
  int requests, lane;

  struct Request { int b, begin, end, total; };  // tiles begin .. end of the line

  // Shares below `least` are doubled, up to that: half of the programs then work, and half as many pieces are merged.
  DEV static int share(int tiles, int programs, int least) {
    const int each = (tiles + programs - 1) / programs, twice = (2 * tiles + programs - 1) / programs;
    const int some = each >= least ? each : twice < least ? twice : least;
    return some > 1 ? some : 1;
  }
  DEV int total_of(int b) const { return b < requests ? (int)totals[b * stride] : 0; }
  DEV int tiles_of(int total) const { return (total + PAGE - 1) / PAGE; }
  DEV int scan(int x) const {
#pragma unroll
    for (int m = 1; m < 32; m *= 2) {
      const int other = shuffle_up(x, m);
      x += lane >= m ? other : 0;
    }
    return x;
  }
  DEV int tiles() const { return before(requests); }
  DEV int before(int request) const {
    int mine = 0;
    for (int b = lane; b < request; b += 32) mine += tiles_of(total_of(b));
    return shuffle(scan(mine), 31);
  }
  DEV Request locate(int tile) const {
    int before = 0;
    for (int base = 0;; base += 32) {
      const int total = total_of(base + lane), tiles = tiles_of(total), ends = before + scan(tiles);
      const uint32_t past = lanes_where(ends > tile);
      if (past) {
        const int i = first_set(past), end = shuffle(ends, i);
        return {base + i, end - shuffle(tiles, i), end, shuffle(total, i)};
      }
      before = shuffle(ends, 31);
    }
  }
  DEV Request after(const Request& r) const {
    Request next{r.b + 1, r.end, r.end, 0};
    while ((next.total = total_of(next.b)) <= 0) next.b++;
    next.end += tiles_of(next.total);
    return next;
  }
};
