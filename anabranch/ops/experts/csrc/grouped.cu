// Host side of grouped.cuh: tensor maps and launch. Shapes, dtypes and strides are checked by the caller (grouped.py).
#include <tvm/ffi/function.h>

#include "../../csrc/launch.cuh"
#include "grouped.cuh"
#include "grouped_sort.cuh"

using tvm::ffi::TensorView;

namespace {

GroupedParams params(TensorView table, TensorView out, int64_t columns, int blocks) {
  GroupedParams p{};
  p.table = static_cast<const int*>(table.data_ptr());
  p.out = static_cast<uint16_t*>(out.data_ptr());
  p.slots = (int)table.size(1), p.blocks = blocks, p.columns = (int)columns, p.width = (int)out.size(1);
  return p;
}

// table as ops/experts/tiles.py has it; places[i]: where pair i comes among the sorted ones, -1 if it is in no tile
void grouped_sort(TensorView experts, int64_t first, int64_t count, int64_t tile, int64_t tail, TensorView places,
                  TensorView table) {
  SortParams p{};
  p.experts = static_cast<const int64_t*>(experts.data_ptr());
  p.places = static_cast<int*>(places.data_ptr()), p.table = static_cast<int*>(table.data_ptr());
  p.pairs = (int)places.size(0), p.first = (int)first, p.count = (int)count, p.slots = (int)table.size(1);
  p.tile = (int)tile, p.tail = (int)tail;
  launch_early<sort_kernel>(p, SORT_CTAS, SORT_THREADS, sizeof(SortSmem), experts.device(), SORT_CTAS);
}

// In tiles of at most `most` pairs, by at most `programs` programs
template <bool GATE_UP, int MOST>
void launch(const GroupedParams& p, int64_t programs, DLDevice device) {
  const int64_t pieces = (int64_t)p.slots * p.blocks;
  const int few = (int)(pieces < programs ? pieces : programs);
  launch_early<grouped_kernel<GATE_UP, MOST>>(p, few, CONSUMERS + PRODUCERS, sizeof(GroupedSmem<GATE_UP, MOST>), device);
}
template <bool GATE_UP>
void launch(int64_t most, const GroupedParams& p, int64_t programs, DLDevice device) {
  if (most > SMALL_MOST) launch<GATE_UP, LARGE_MOST>(p, programs, device);
  else launch<GATE_UP, SMALL_MOST>(p, programs, device);
}

// out[places[i]] = row i / top_k of x [T, W] and order[places[i]] = i, for the pairs in tiles
void grouped_spread(TensorView x, TensorView places, TensorView order, TensorView out) {
  SpreadParams p{};
  p.x = static_cast<const uint16_t*>(x.data_ptr()), p.out = static_cast<uint16_t*>(out.data_ptr());
  p.places = static_cast<const int*>(places.data_ptr()), p.order = static_cast<int*>(order.data_ptr());
  p.columns = (int)x.size(1), p.top_k = (int)(places.size(0) / x.size(0)), p.x_stride = x.stride(0);
  launch_early<spread_kernel>(p, (int)x.size(0), SPREAD_THREADS, 0, x.device());
}

// a matrix [P, K] of sorted rows, `box` of them a box
Map sorted_rows(TensorView t, int box) {
  const int64_t columns = t.size(1), rows = t.size(0);
  return map_of(t.data_ptr(), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                {{columns, rows, 1, 1, 1}, {columns, columns, columns, columns}, {BLOCK, box, 1, 1, 1}});
}

// h[i] = act(gate, up) of row i of sorted x [P, W] against w13 [E, 2 * I, W], for the pairs in the table's tiles of at
// most `most` pairs
void grouped_gate_up(TensorView x, TensorView w13, TensorView table, TensorView h, bool situ, double beta,
                     double linear_beta, int64_t most, int64_t programs) {
  const int64_t inner = w13.size(1) / 2, width = w13.size(2);
  GroupedParams p = params(table, h, width, (int)((2 * inner + ROWS - 1) / ROWS));
  p.rows = sorted_rows(x, BOX), p.wide = sorted_rows(x, WIDE_BOX);
  p.activation = activation_of(situ, beta, linear_beta);
  // eight rows of gate, the same eight of up, and so on
  p.weights = map_of(w13.data_ptr(), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                     {{width, 8, 2, inner / 8, w13.size(0)},
                      {width, inner * width, 8 * width, 2 * inner * width},
                      {BLOCK, 8, 2, ROWS / 16, 1}});
  launch<true>(most, p, programs, x.device());
}

// out[order[i]] = w2 [E, W, I] times row i of h, for the pairs in the table's tiles of at most `most` pairs
void grouped_down(TensorView h, TensorView w2, TensorView order, TensorView table, TensorView out, int64_t most,
                  int64_t programs) {
  const int64_t width = w2.size(1), inner = w2.size(2);
  GroupedParams p = params(table, out, inner, (int)((width + ROWS - 1) / ROWS));
  p.order = static_cast<const int*>(order.data_ptr());
  p.weights = map_of(w2.data_ptr(), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                     {{inner, width, w2.size(0), 1, 1}, {inner, width * inner, inner, inner}, {BLOCK, ROWS, 1, 1, 1}});
  p.rows = sorted_rows(h, BOX), p.wide = sorted_rows(h, WIDE_BOX);
  launch<false>(most, p, programs, h.device());
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(grouped_sort, grouped_sort);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(grouped_spread, grouped_spread);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(grouped_gate_up, grouped_gate_up);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(grouped_down, grouped_down);
