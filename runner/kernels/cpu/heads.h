// Values per edge and head of one destination's edges, side by side: rows of H values padded so that whole vectors can walk them.
//
// With H below a vector's lanes a row is padded to the next power of two, and a vector holds several edges; with more, to whole vectors.
// Either way lane l of the buffer belongs to head l % pitch, and maxima, exponentials and sums are taken on full vectors.
#pragma once
#include <vector>

#include "lanes.h"

template <class A>
struct HeadRows {
  static constexpr int L = kVectorBytes / sizeof(A);
  typedef Lanes<A, L> Vector;

  int64_t num_heads, pitch, period;  // period: vectors after which the heads repeat
  std::vector<A> buffer, high, total;

  explicit HeadRows(int64_t num_heads) : num_heads(num_heads) {
    pitch = 1;
    while (pitch < num_heads && pitch < L) pitch *= 2;
    if (num_heads > L) pitch = (num_heads + L - 1) / L * L;
    period = pitch < L ? 1 : pitch / L;
    high.resize(period * L), total.resize(period * L);
  }

  // Makes room for the values of n edges; those of the padding are ``pad``, up to a whole period of vectors.
  void resize(int64_t n, A pad) {
    const int64_t unit = period * L, size = (n * pitch + unit - 1) / unit * unit;
    if (int64_t(buffer.size()) < size) buffer.resize(size);
    if (pitch != num_heads)
      for (int64_t k = 0; k < n; ++k)
        for (int64_t h = num_heads; h < pitch; ++h) buffer[k * pitch + h] = pad;
    for (int64_t k = n * pitch; k < size; ++k) buffer[k] = pad;
    num_vectors = size / L;
  }
  A* row(int64_t k) { return buffer.data() + k * pitch; }

  // high[h] = the largest value of head h, in every lane of h.
  void find_high() {
    for (int64_t part = 0; part < period; ++part) {
      Vector best = load<L>(buffer.data() + part * L);
      for (int64_t v = part + period; v < num_vectors; v += period) {
        const Vector values = load<L>(buffer.data() + v * L);
        best = (values > best) | (values != values) ? values : best;
      }
      store<L>(high.data() + part * L, best);
    }
    fold(high.data(), [](A a, A b) { return b > a || b != b ? b : a; });
  }

  // Replaces values by e^(value - high); total[h] = their sum by head.
  void exponentiate() {
    for (int64_t part = 0; part < period; ++part) {
      const Vector shift = load<L>(high.data() + part * L);
      Vector sum = splat<A, L>(A(0));
      for (int64_t v = part; v < num_vectors; v += period) {
        const Vector values = exponential<L>(load<L>(buffer.data() + v * L) - shift);
        store<L>(buffer.data() + v * L, values);
        sum += values;
      }
      store<L>(total.data() + part * L, sum);
    }
    fold(total.data(), [](A a, A b) { return a + b; });
  }

  // Replaces values by value · factor[h]; factor has a value for every lane of a period.
  void scale(const A* factor) {
    for (int64_t v = 0; v < num_vectors; ++v)
      store<L>(buffer.data() + v * L, load<L>(buffer.data() + v * L) * load<L>(factor + v % period * L));
  }

  // Repeats values per head over the lanes of a period.
  void spread(A* lanes) const {
    for (int64_t at = num_heads; at < pitch; ++at) lanes[at] = A(0);
    for (int64_t at = pitch; at < period * L; ++at) lanes[at] = lanes[at - pitch];
  }

  int64_t num_vectors = 0;

 private:
  template <class Combine>
  void fold(A* lanes, Combine combine) {  // several lanes of a vector belong to one head
    for (int64_t h = 0; h < pitch && pitch < L; ++h) {
      for (int64_t at = h + pitch; at < L; at += pitch) lanes[h] = combine(lanes[h], lanes[at]);
      for (int64_t at = h + pitch; at < L; at += pitch) lanes[at] = lanes[h];
    }
  }
};

// Calls f with H as a std::integral_constant for the head counts that models have, so that copies of H values are unrolled; with 0 else.
template <class F>
inline void with_heads(int64_t num_heads, F f) {
  switch (num_heads) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 4: return f(std::integral_constant<int, 4>{});
    case 8: return f(std::integral_constant<int, 8>{});
    case 16: return f(std::integral_constant<int, 16>{});
    default: return f(std::integral_constant<int, 0>{});
  }
}
