// What the streamed products use beyond grouped.h: copies whose arrival a barrier counts.
#pragma once
#include "grouped.h"

// They land all at once, whenever; until then nothing may have been written to their places or read from them.
inline void arrive_behind_copies(uint32_t bar) {
  if (copies.size() < E.fibers.size()) copies.resize(E.fibers.size());
  char* const base = shared_pointer(0);
  Counted* const counter = &counted(bar);
  under_way.push_back([=, mine = std::exchange(copies[E.current], {})] {
    for (const Copy& c : mine) memset(base + c.to, 0, 16), memcpy(base + c.to, c.from, c.bytes);
    counter->pending--, settle(*counter);
  });
}
inline void copies_to_wgmma() {}
