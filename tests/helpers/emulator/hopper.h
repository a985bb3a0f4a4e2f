// What the second kernel of the chunked prefill uses beyond matrix.h: counted barriers, TMA, products of a warpgroup.
//
// What TMA brings arrives in any order, while somebody waits. A product is computed when its thread waits for it, from
// what its registers and shared memory hold then: changing either too early shows.
#pragma once
#include "matrix.h"

struct Counted { int32_t bytes; uint8_t pending, count; uint16_t phase; };
static_assert(sizeof(Counted) == sizeof(uint64_t));
inline Counted& counted(uint32_t bar) { return *(Counted*)shared_pointer(bar); }
inline void settle(Counted& b) { if (!b.pending && !b.bytes) b.phase ^= 1, b.pending = b.count; }
inline void barrier_init(uint32_t bar, uint32_t n) { counted(bar) = {0, (uint8_t)n, (uint8_t)n, 0}; }
inline void barrier_init_done() {}
inline void barrier_arrive(uint32_t bar) {
  Counted& b = counted(bar);
  if (!b.pending) refuse("more arrivals than a barrier takes");
  b.pending--, settle(b);
}
inline void barrier_expect(uint32_t bar, uint32_t bytes) { counted(bar).bytes += bytes, barrier_arrive(bar); }

inline std::vector<std::function<void()>> under_way;
inline void barrier_wait(uint32_t bar, uint32_t parity) {
  while (counted(bar).phase == parity) {
    if (!under_way.empty() && draw() % 3 == 0) {
      std::swap(under_way[draw() % under_way.size()], under_way.back());
      const std::function<void()> next = under_way.back();
      under_way.pop_back(), next();
    }
    yield();
  }
}
inline void land(Counted* b, int bytes) { b->bytes -= bytes, settle(*b); }
inline void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
  if ((to | bytes | (uintptr_t)from) & 15) refuse("a bulk copy that is not on 16 bytes");
  char* const target = shared_pointer(to);
  Counted* const b = &counted(bar);
  under_way.push_back([=] { memcpy(target, from, bytes), land(b, (int)bytes); });
}

// --- TMA: boxes of [blocks][rows][64] 16-bit values, 128-byte swizzle, zeros past the last row ---
struct CUtensorMap { const char* data; int64_t rows, blocks, pitch; int box_rows, box_blocks; };
inline CUtensorMap map_of(const void* data, int64_t rows, int64_t blocks, int64_t pitch, int box_rows, int box_blocks) {
  if ((uintptr_t)data % 16 || pitch * 2 % 16 || box_rows > 256) refuse("a tensor that TMA cannot read");
  return {(const char*)data, rows, blocks, pitch * 2, box_rows, box_blocks};
}
constexpr uint64_t kEvictFirst = 0;
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }
inline void tma_load(uint32_t to, const CUtensorMap* map, int row, int block, uint32_t bar, uint64_t) {
  if (to % 1024) refuse("a swizzled tile that is not on 1024 bytes");
  char* const base = shared_pointer(0);
  Counted* const b = &counted(bar);
  const CUtensorMap m = *map;
  under_way.push_back([=] {
    for (int n = 0; n < m.box_blocks; n++)
      for (int r = 0; r < m.box_rows; r++)
        for (int piece = 0; piece < 8; piece++) {
          char* const target = base + swizzled(to + (n * m.box_rows + r) * 128 + piece * 16);
          if (row + r < m.rows && block + n < m.blocks)
            memcpy(target, m.data + (row + r) * m.pitch + (block + n) * 128 + piece * 16, 16);
          else memset(target, 0, 16);
        }
    land(b, m.box_rows * m.box_blocks * 128);
  });
}

// --- wgmma with its left operand in registers ---
struct Group { std::vector<std::vector<std::function<void()>>> groups{1}; };
inline std::vector<Group> products;
inline Group& my_products() {
  if (products.size() < E.fibers.size()) products.resize(E.fibers.size());
  return products[E.current];
}
inline uint64_t wgmma_operand(uint32_t address) { return address >> 4 | 64ull << 32; }
inline uint64_t wgmma_operand_by_rows(uint32_t address, uint32_t blocks) {
  return address >> 4 | (uint64_t)(blocks >> 4) << 16 | 64ull << 32;
}
inline float right_operand(uint64_t b, int n, int k, bool by_rows) {
  const uint32_t first = (b & 0x3fff) << 4, blocks = (b >> 16 & 0x3fff) << 4, groups = (b >> 32 & 0x3fff) << 4;
  const uint32_t at = by_rows ? n / 64 * blocks + k / 8 * groups + k % 8 * 128 + n % 64 * 2
                              : n / 8 * groups + n % 8 * 128 + k * 2;
  return bf16_to_f32(*(const uint16_t*)shared_pointer(swizzled(first + at)));
}
template <bool ADD, bool MINUS = false, bool BY_ROWS = false, int R>
void wgmma(float (&d)[R], const uint32_t* a, uint64_t b) {
  float* const sum = d;
  my_products().groups.back().push_back([=] {
    const Operands* all = everyone(Operands{{a[0], a[1], a[2], a[3]}, {0, 0}});
    const int lane = E.current % 32;
    for (int i = 0; i < R; i++) {
      const int n = i / 4 * 8 + lane % 4 * 2 + i % 2;
      float x = ADD ? sum[i] : 0.f;
      for (int k = 0; k < 16; k++) {
        const uint32_t pair = all[lane / 4 * 4 + k % 8 / 2].a[k / 8 * 2 + i / 2 % 2];
        const float left = bf16_to_f32(pair >> (k % 2 * 16) & 0xffffu);
        x = fmaf(MINUS ? -left : left, right_operand(b, n, k, BY_ROWS), x);
      }
      sum[i] = x;
    }
  });
}
inline void wgmma_fence() {}
inline void wgmma_commit() { my_products().groups.emplace_back(); }
template <int N> void wgmma_wait() {
  auto& groups = my_products().groups;  // the last one is still open
  while ((int)groups.size() > N + 1) {
    const auto oldest = std::move(groups.front());
    my_products().groups.erase(my_products().groups.begin());
    for (const auto& product : oldest) product();
  }
  __syncwarp();  // the instruction waits for the whole warp
}
template <int R> void pin(float (&)[R]) {}
inline void store_matrices_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const int lane = E.current % 32;
  const uint32_t x[4] = {a, b, c, d};
  for (int n = 0; n < 4; n++) {
    const uint32_t row = shuffle(address, 8 * n + lane / 4);
    *(uint32_t*)(shared_pointer(row) + lane % 4 * 4) = transpose_8x8(x[n]);
  }
}
template <int REGISTERS> void take_registers() {}
template <int REGISTERS> void give_registers() {}
inline void wait_for_previous() { griddep_wait(); }
