// A value per edge from the rows of its ends: OPERATION 0 dot (per head), 1 add, 2 sub, 3 mul of U[source] and V[destination].
//
// sddmm_csr_group_per_row: a group of lanes walks a destination's edges; for dot it works on one head, summed over the group.
#include "common.cuh"

enum { kDot, kAdd, kSub, kMul };

extern "C" __global__ void sddmm(const int64* indptr, const I* indices, const I* edge_ids, int64 num_rows, const S* u, int64 u_stride,
                                 const S* v, int64 v_stride, int64 num_features, int64 num_heads, S* out) {
  const Graph g{indptr, indices, edge_ids, num_rows};
  const int64 channels = num_features / num_heads;
  if (OPERATION == kDot) {
    const int64 count = num_rows * num_heads;
    for (int64 item = group_number(); item < whole_warps(count); item += num_groups()) {
      const bool is_real = item < count;
      const int64 row = is_real ? item / num_heads : 0, head = is_real ? item % num_heads : 0;
      const int64 begin = is_real ? indptr[row] : 0, length = is_real ? indptr[row + 1] - begin : 0, longest = warp_max(length);
      for (int64 k = 0; k < longest; ++k) {
        const bool is_edge = k < length;
        A sum = A(0);
        if (is_edge) {
          const S* here = v + row * v_stride + head * channels;
          const S* there = u + int64(indices[begin + k]) * u_stride + head * channels;
          for (int64 c = lane_of_group(); c < channels; c += GROUP) sum += value(here[c]) * value(there[c]);
        }
        sum = group_sum(sum);
        if (is_edge && lane_of_group() == 0) keep(out + g.edge(begin + k) * num_heads + head, sum);
      }
    }
    return;
  }
  for (int64 row = group_number(); row < num_rows; row += num_groups())
    for (int64 entry = indptr[row]; entry < indptr[row + 1]; ++entry) {
      const S* there = u + int64(indices[entry]) * u_stride;
      const S* here = v + row * v_stride;
      for (int64 c = lane_of_group(); c < num_features; c += GROUP) {
        const A left = value(there[c]), right = value(here[c]);
        keep(out + g.edge(entry) * num_features + c, OPERATION == kAdd ? left + right : OPERATION == kSub ? left - right : left * right);
      }
    }
}
