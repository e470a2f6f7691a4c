// Dropout without a stored mask: whether an element is kept is a function of (seed, row, column), the same on every backend.
#pragma once
#include <cstdint>

#include "lanes.h"

// A bijective 32-bit mix (xor-shift-multiply, two rounds; the constants of Wellons' search for low bias).
template <class U>
inline U mix(U x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

struct Dropout {
  uint32_t low, high, threshold;  // an element is kept where its 32 random bits are at least the threshold
  double scale;
  Dropout(double probability, int64_t seed)
      : low(mix(uint32_t(seed))), high(mix(uint32_t(uint64_t(seed) >> 32) + 0x9e3779b9u)),
        threshold(uint32_t(probability * 4294967296.0)), scale(1.0 / (1.0 - probability)) {}
  bool is_on() const { return threshold != 0; }
  uint32_t row_key(int64_t row) const {
    return mix(mix(uint32_t(row) ^ low) + uint32_t(uint64_t(row) >> 32) + high);
  }
  bool keeps(uint32_t row_key, int64_t column) const {
    return mix(mix(uint32_t(column) * 0x9e3779b9u ^ row_key) + low) >= threshold;
  }
};
