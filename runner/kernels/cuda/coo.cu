// Y += A X from coordinates, one group of lanes an entry, added atomically: fast where most rows have no entry or a few have very many, but
// the order of the sums, and so their last bits, change from run to run.
//
// Legend: E entries, F features.
#include "common.cuh"

extern "C" __global__ void coo(const I* rows, const I* columns, const S* weight, int64 num_entries, const S* x, int64 num_features, S* y) {
  for (int64 entry = group_number(); entry < num_entries; entry += num_groups()) {
    const A factor = WEIGHTED ? value(weight[entry]) : A(1);
    const int64 row = rows[entry], column = columns[entry];
    for (int64 at = (int64(blockIdx.y) * GROUP + lane_of_group()) * VEC; at < num_features; at += int64(gridDim.y) * GROUP * VEC) {
      A message[VEC];
      load(x + column * num_features + at, message);
#pragma unroll
      for (int k = 0; k < VEC; ++k) atomicAdd(y + row * num_features + at + k, message[k] * factor);
    }
  }
}
