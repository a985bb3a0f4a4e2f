// Residual add, RMSNorm, router logits and the choice of experts for a few tokens, in one launch.
//
// The first blocks are workers: each has the weight rows of some experts in registers before the kernel in front has
// ended, norms every token for itself, multiplies, and mails each score as one word that cannot be zero. In the last
// blocks a warp owns a token: it waits for the words, puts zeros in their place and chooses. So there is no counter, no
// fence, and a score travels once. Nobody waits for a block behind it.
#pragma once
#include "chooser.cuh"

constexpr int REGISTERS = 200;  // a block fits on a multiprocessor beside one of the projection in front

template <int N, int ROWS, int TOKENS, int MOST>
struct RouteShared {
  static constexpr int CHOOSERS = 1024 / MOST;  // tokens of a choosing block
  union {
    typename Worker<N, ROWS, TOKENS>::Shared work;
    Candidates<MOST> choose[CHOOSERS];
  };
};

template <int N, int ROWS, int TOKENS, int MOST>
__global__ void __maxnreg__(REGISTERS) route_kernel(const __grid_constant__ RouteParams p) {
  using Shared = RouteShared<N, ROWS, TOKENS, MOST>;
  Shared& s = smem_base<Shared>();
  if ((int)blockIdx.x < p.workers) return Worker<N, ROWS, TOKENS>(p, s.work).run();
  const int token = ((int)blockIdx.x - p.workers) * Shared::CHOOSERS + warp_id();
  if (warp_id() < Shared::CHOOSERS && token < p.tokens) return Chooser<MOST>(p, s.choose[warp_id()], token).run();
  wait_for_previous();
}
