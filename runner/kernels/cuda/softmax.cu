// Softmax of values per edge over the edges that share a destination, per head, and its backward; a group of lanes a row and head, its
// lanes over the row's edges.
#include "common.cuh"

struct Item {
  int64 row, head, begin, end;
  bool is_real;
  __device__ Item(int64 item, int64 num_rows, int64 num_heads, const int64* indptr) : is_real(item < num_rows * num_heads) {
    row = is_real ? item / num_heads : 0, head = is_real ? item % num_heads : 0;
    begin = is_real ? indptr[row] : 0, end = is_real ? indptr[row + 1] : 0;
  }
};

extern "C" __global__ void edge_softmax(const int64* indptr, const I* edge_ids, int64 num_rows, const S* logits, int64 num_heads, S* out) {
  const Graph g{indptr, nullptr, edge_ids, num_rows};
  for (int64 number = group_number(); number < whole_warps(num_rows * num_heads); number += num_groups()) {
    const Item item(number, num_rows, num_heads, indptr);
    A high = -infinity(), total = A(0);
    for (int64 k = item.begin + lane_of_group(); k < item.end; k += GROUP) {
      const A logit = value(logits[g.edge(k) * num_heads + item.head]);
      high = logit > high || logit != logit ? logit : high;
    }
    high = group_max(high);
    for (int64 k = item.begin + lane_of_group(); k < item.end; k += GROUP)
      total += Epilogue::exponential(value(logits[g.edge(k) * num_heads + item.head]) - high);
    total = group_sum(total);
    for (int64 k = item.begin + lane_of_group(); k < item.end; k += GROUP) {
      const int64 at = g.edge(k) * num_heads + item.head;
      keep(out + at, Epilogue::exponential(value(logits[at]) - high) / total);
    }
  }
}

// dlogits = a · (da - sum over the destination's edges of a · da).
extern "C" __global__ void edge_softmax_backward(const int64* indptr, const I* edge_ids, int64 num_rows, const S* a, const S* da,
                                                 int64 num_heads, S* dlogits) {
  const Graph g{indptr, nullptr, edge_ids, num_rows};
  for (int64 number = group_number(); number < whole_warps(num_rows * num_heads); number += num_groups()) {
    const Item item(number, num_rows, num_heads, indptr);
    A dot = A(0);
    for (int64 k = item.begin + lane_of_group(); k < item.end; k += GROUP) {
      const int64 at = g.edge(k) * num_heads + item.head;
      dot += value(a[at]) * value(da[at]);
    }
    dot = group_sum(dot);
    for (int64 k = item.begin + lane_of_group(); k < item.end; k += GROUP) {
      const int64 at = g.edge(k) * num_heads + item.head;
      keep(dlogits + at, value(a[at]) * (value(da[at]) - dot));
    }
  }
}
