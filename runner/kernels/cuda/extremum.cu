// The backward of max and min: each output's gradient goes to the one entry that was taken.
//
// Legend: N rows, M columns, E edges, F features, H heads.
#include "common.cuh"

// dX[j] = col_scale[j] · sum over j's out-edges of weight · row_scale[i] · dY[i] where i took the edge; a group a source, over the
// transposed graph. ``entries`` holds the entry of the graph that each entry of the transposed is.
extern "C" __global__ void extremum_grad_x(const int64* indptr, const I* indices, const I* edge_ids, int64 num_rows, const I* entries,
                                           const I* places, const S* dy, int64 num_features, const S* weight, int64 num_heads,
                                           const S* row_scale, const S* col_scale, S* dx) {
  const Graph g{indptr, indices, edge_ids, num_rows};
  const int64 channels = num_features / num_heads;
  for (int64 row = group_number(); row < num_rows; row += num_groups())
    for (int64 at = lane_of_group(); at < num_features; at += GROUP) {
      A sum = A(0);
      for (int64 k = indptr[row]; k < indptr[row + 1]; ++k) {
        const int64 from = indices[k];
        if (places[from * num_features + at] != entries[k]) continue;
        A message = value(dy[from * num_features + at]);
        if (weight) message *= value(weight[g.edge(k) * num_heads + at / channels]);
        sum += row_scale ? message * value(row_scale[from]) : message;
      }
      keep(dx + row * num_features + at, col_scale ? sum * value(col_scale[row]) : sum);
    }
}

// dweight[e, h] = row_scale[i] · col_scale[j] · sum over the head's features that took e of dY[i] · X[j]; a group a destination.
extern "C" __global__ void extremum_grad_weight(const int64* indptr, const I* indices, const I* edge_ids, int64 num_rows,
                                                const I* places, const S* dy, const S* x, int64 x_stride, int64 num_features,
                                                int64 num_heads, const S* row_scale, const S* col_scale, S* dweight) {
  const Graph g{indptr, indices, edge_ids, num_rows};
  const int64 channels = num_features / num_heads;
  for (int64 row = group_number(); row < num_rows; row += num_groups())
    for (int64 k = indptr[row]; k < indptr[row + 1]; ++k) {
      const int64 from = indices[k];
      const A factor = (row_scale ? value(row_scale[row]) : A(1)) * (col_scale ? value(col_scale[from]) : A(1));
      for (int64 head = lane_of_group(); head < num_heads; head += GROUP) {
        A sum = A(0);
        for (int64 at = head * channels; at < (head + 1) * channels; ++at)
          if (places[row * num_features + at] == I(k)) sum += value(dy[row * num_features + at]) * value(x[from * x_stride + at]);
        keep(dweight + g.edge(k) * num_heads + head, sum * factor);
      }
    }
}
