// Values per head in vectors of W lanes, lane h for head h, and what attention and softmax do with them.
//
// Lanes beyond the last head hold whatever lay behind; nothing that is kept depends on them.
#pragma once
#include <vector>

#include "lanes.h"

template <class A, int W>
inline Lanes<A, W> permute(Lanes<A, W> from, Lanes<Signed<A>, W> place) {
  if constexpr (W == 1) {
    return from;
  } else {
#if defined(__clang__)
    Lanes<A, W> to;
    for (int lane = 0; lane < W; ++lane) to[lane] = from[place[lane]];
    return to;
#else
    return __builtin_shuffle(from, place);
#endif
  }
}

// 0, 1, 2, …
template <class A, int W>
inline Lanes<Signed<A>, W> iota() {
  alignas(64) static const Signed<A> kNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Lanes<Signed<A>, W> lanes;
  memcpy(&lanes, kNumbers, sizeof lanes);
  return lanes;
}

// Combines the lanes that differ only in the bits from ``first`` (included) to ``end``, powers of two; each of them gets the result.
template <class A, int W, class Combine>
inline Lanes<A, W> fold(Lanes<A, W> lanes, int first, int end, Combine combine) {
  if constexpr (W > 1)
    for (int bit = first; bit < end; bit *= 2) lanes = combine(lanes, permute<A, W>(lanes, iota<A, W>() ^ Signed<A>(bit)));
  return lanes;
}
// Sums groups of G neighbouring lanes; each lane gets its group's.
template <class A, int W, int G>
inline Lanes<A, W> sum_groups(Lanes<A, W> lanes) {
  if constexpr (G > 1 && W > 1) {
    lanes += permute<A, W>(lanes, iota<A, W>() ^ Signed<A>(G / 2));
    return sum_groups<A, W, G / 2>(lanes);
  }
  return lanes;
}

// The same values in the lower half of wider vectors; what the upper half holds is left open.
template <class A, int W>
inline Lanes<A, W> widened(Lanes<A, W / 2> half) {
  Lanes<A, W> lanes;
#if defined(__AVX512F__)
  if constexpr (std::is_same<A, float>::value && W == 16) return (Lanes<A, W>)_mm512_castps256_ps512((__m256)half);
  if constexpr (std::is_same<A, double>::value && W == 8) return (Lanes<A, W>)_mm512_castpd256_pd512((__m256d)half);
#endif
  memcpy(&lanes, &half, sizeof half);
  return lanes;
}

// Loads the values of ``num_heads`` heads at an offset of an array of ``size``: a whole vector where the array goes on that far, half a one
// where that is enough, since the next line of the cache may be far.
template <int W, class S>
inline Lanes<Compute<S>, W> load_heads(const S* from, int64_t at, int64_t num_heads, int64_t size) {
  typedef Compute<S> A;
  if constexpr (W > 2) {
    if (num_heads == W / 2) return widened<A, W>(load<W / 2>(from + at));
  }
  if (at + W <= size) return load<W>(from + at);
  A lanes[W] = {};
  for (int64_t h = 0; h < num_heads; ++h) lanes[h] = value(from + at + h);
  return load<W>(lanes);
}

template <int W, class S>
inline void store_heads(S* to, Lanes<Compute<S>, W> lanes, int64_t num_heads) {
  if (num_heads == W) return store<W>(to, lanes);
  if constexpr (W > 1) {
    Compute<S> held[W];
    store<W>(held, lanes);
    if constexpr (W > 8) {
      if (num_heads == 8) return store<8>(to, load<8>(held));
    }
    if constexpr (W > 4) {
      if (num_heads == 4) return store<4>(to, load<4>(held));
    }
    for (int64_t h = 0; h < num_heads; ++h) store<1>(to + h, held[h]);
  }
}

template <class A, int W>
inline Lanes<A, W> larger(Lanes<A, W> a, Lanes<A, W> b) {  // a NaN is the largest
  return (b > a) | (b != b) ? b : a;
}

// The values of several edges and up to W heads, rows of ``pitch`` lanes (a power of two) side by side, so that whole vectors walk them.
// Lane l of the buffer belongs to head l % pitch.
template <class A, int W>
struct Tile {
  typedef Lanes<A, W> Vector;
  int64_t pitch = 1, num_vectors = 0;
  std::vector<A> buffer;

  explicit Tile(int64_t num_heads, int64_t most_edges = 0) {
    while (pitch < num_heads) pitch *= 2;
    buffer.resize(most_edges * pitch + 2 * W);
  }

  // Makes room for n edges; rows are to be written in ascending order, a vector each.
  void resize(int64_t n) {
    num_vectors = (n * pitch + W - 1) / W;
    if (int64_t(buffer.size()) < n * pitch + 2 * W) buffer.resize(n * pitch + 2 * W);
  }
  A* row(int64_t k) { return buffer.data() + k * pitch; }
  // One head is put and got as the number it is: vectors that overlap a store of just before would wait for it.
  void put(int64_t k, Vector values) {
    if (pitch > 1) return store<W>(row(k), values);
    A lanes[W];
    store<W>(lanes, values);
    *row(k) = lanes[0];
  }
  Vector get(int64_t k) { return pitch > 1 ? load<W>(row(k)) : splat<A, W>(*row(k)); }
  // Fills what lies behind n rows in their last vector.
  void pad(int64_t n, A with) { store<W>(row(n), splat<A, W>(with)); }

  // The largest value of each head, in every lane of the head.
  Vector high() const {
    Vector best = load<W>(buffer.data());
    for (int64_t v = 1; v < num_vectors; ++v) best = larger<A, W>(best, load<W>(buffer.data() + v * W));
    return fold<A, W>(best, int(pitch), W, larger<A, W>);
  }
  // Replaces values by e^(value - shift); returns their sum by head, in every lane of the head.
  Vector exponentiate(Vector shift) {
    Vector sum = splat<A, W>(A(0));
    for (int64_t v = 0; v < num_vectors; ++v) {
      const Vector values = exponential<W>(load<W>(buffer.data() + v * W) - shift);
      store<W>(buffer.data() + v * W, values);
      sum += values;
    }
    return fold<A, W>(sum, int(pitch), W, [](Vector a, Vector b) { return a + b; });
  }
  void scale(Vector factor) {
    for (int64_t v = 0; v < num_vectors; ++v) store<W>(buffer.data() + v * W, load<W>(buffer.data() + v * W) * factor);
  }
};
