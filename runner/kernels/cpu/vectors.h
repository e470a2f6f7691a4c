// Features [first, end) of a row as vectors of W lanes that don't cross heads, taken a few at a time.
//
// The last vector of a head is moved back so that it ends at the head's last feature: it overlaps the one before and computes some lanes
// twice, which needs no mask on any processor. Only for work whose repetition does no harm.
#pragma once
#include <cstdint>

constexpr int kMaxVectors = 8;  // of one pass over a row's edges: as many accumulators as AVX2 has registers for

// The vectors of one pass: where each begins in a row, and its head.
struct Vectors {
  int count;
  int64_t offset[kMaxVectors];
  int64_t head[kMaxVectors];
};

template <int W, int MaxLength = kMaxVectors>
struct Cut {
  int64_t begin, channels, per_head, num_vectors, length;  // length: vectors a pass, so that passes are about equal

  Cut(int64_t first, int64_t end, int64_t num_heads) : begin(first), channels((end - first) / num_heads) {
    per_head = (channels + W - 1) / W;
    num_vectors = per_head * num_heads;
    const int64_t num_passes = (num_vectors + MaxLength - 1) / MaxLength;
    length = (num_vectors + num_passes - 1) / num_passes;
  }

  Vectors vectors(int64_t first) const {
    Vectors cut;
    cut.count = int(num_vectors - first < length ? num_vectors - first : length);
    for (int v = 0; v < cut.count; ++v) {
      const int64_t head = (first + v) / per_head, within = ((first + v) % per_head) * W;
      cut.head[v] = head;
      cut.offset[v] = begin + head * channels + (within + W <= channels ? within : channels - W);
    }
    return cut;
  }
};
