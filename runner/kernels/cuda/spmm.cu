// Y = epilogue(row_scale · reduce over a destination's edges of weight · col_scale[source] · X[source]).
//
// spmm_csr_group_per_row: a group of lanes owns a row and, by blockIdx.y, a slice of GROUP · VEC features. REDUCE 0 sum, 1 max, 2 min;
// WEIGHTING 0 none, 1 a factor an edge, 2 a weight per edge and head, 3 a weight per edge and feature; PLACES 1: max and min also say which
// entry they took.
//
// Legend: N rows, M columns, E edges, F features, H heads.
#include "common.cuh"

enum { kNone, kPerEdge, kPerHead, kPerChannel };
constexpr int64 kTile = 64;  // edges

extern "C" __global__ void spmm(const int64* indptr, const I* indices, const I* edge_ids, int64 num_rows, const S* x, int64 x_stride,
                                int64 num_features, const S* weight, int64 num_heads, const S* row_scale, const S* col_scale,
                                const S* bias, int64 activation, double slope, double dropout, int64 seed, const S* addend,
                                const S* addend_scale, S* y, I* places) {
  const Graph g{indptr, indices, edge_ids, num_rows};
  const Epilogue epilogue{row_scale, bias, int(activation), A(slope), Dropout(dropout, seed), addend,
                          addend_scale ? value(*addend_scale) : A(1), num_features};
  const int64 channels = num_features / num_heads;
  for (int64 row = group_number(); row < num_rows; row += num_groups()) {
    const int64 begin = indptr[row], end = indptr[row + 1];
    for (int64 at = (int64(blockIdx.y) * GROUP + lane_of_group()) * VEC; at < num_features; at += int64(gridDim.y) * GROUP * VEC) {
      A best[VEC];
      I place[VEC];
#pragma unroll
      for (int k = 0; k < VEC; ++k) best[k] = REDUCE == 0 ? A(0) : REDUCE == 1 ? -infinity() : infinity(), place[k] = I(begin);
      A total[VEC] = {};
      for (int64 entry = begin; entry < end; ++entry) {
        if (REDUCE == 0 && (entry - begin) % kTile == 0) {  // a long row rounds as a sum of short ones
#pragma unroll
          for (int k = 0; k < VEC; ++k) total[k] += best[k], best[k] = A(0);
        }
        const int64 source = indices[entry];
        A message[VEC];
        load(x + source * x_stride + at, message);
        const A scale = WEIGHTING != kNone && col_scale ? value(col_scale[source]) : A(1);
        const int64 edge = WEIGHTING == kNone ? 0 : g.edge(entry);
        const A factor = WEIGHTING == kPerEdge && weight ? value(weight[edge]) * scale : scale;
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
          if (WEIGHTING == kPerEdge) message[k] *= factor;
          if (WEIGHTING == kPerHead) message[k] *= value(weight[edge * num_heads + (at + k) / channels]) * factor;
          if (WEIGHTING == kPerChannel) message[k] *= value(weight[edge * num_features + at + k]) * factor;
          if (REDUCE == 0) {
            best[k] += message[k];
          } else if ((REDUCE == 1 ? message[k] > best[k] : message[k] < best[k]) || (message[k] != message[k] && best[k] == best[k])) {
            best[k] = message[k], place[k] = I(entry);  // the first that attains it, also a NaN
          }
        }
      }
#pragma unroll
      for (int k = 0; k < VEC; ++k) {
        if (REDUCE == 0) best[k] += total[k];
        best[k] = epilogue.finish(begin == end ? A(0) : best[k], row, at + k);
        if (PLACES) places[row * num_features + at + k] = begin == end ? I(-1) : place[k];
      }
      store(y + row * num_features + at, best);
    }
  }
}
