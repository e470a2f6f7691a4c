// Features [first, end) of a row as vectors of W lanes, taken a few at a time.
//
// The last vector is moved back so that it ends at the last feature: it overlaps the one before and computes some lanes twice, which needs
// no mask on any processor. Only for work whose repetition does no harm.
#pragma once
#include <cstdint>

constexpr int kMaxVectors = 8;  // of one pass over a row's edges: as many accumulators as AVX2 has registers for

// The vectors of one pass: where each begins in a row.
struct Vectors {
  int count;
  int64_t offset[kMaxVectors];
};

template <int W, int MaxLength = kMaxVectors>
struct Cut {
  int64_t first, end, num_vectors, length;  // length: vectors a pass, so that passes are about equal

  Cut(int64_t first, int64_t end) : first(first), end(end), num_vectors((end - first + W - 1) / W) {
    const int64_t num_passes = (num_vectors + MaxLength - 1) / MaxLength;
    length = (num_vectors + num_passes - 1) / num_passes;
  }

  Vectors vectors(int64_t from) const {
    Vectors cut;
    cut.count = int(num_vectors - from < length ? num_vectors - from : length);
    for (int v = 0; v < cut.count; ++v) {
      const int64_t at = first + (from + v) * W;
      cut.offset[v] = at + W <= end ? at : end - W;
    }
    return cut;
  }
};
