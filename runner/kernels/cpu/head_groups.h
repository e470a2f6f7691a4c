// Heads in groups of at most W, and how their features lie in vectors of W lanes: what attention's kernels share.
//
// Legend: N rows, M columns, E edges, H heads, C channels a head, D = H · C. j → i.
#pragma once
#include <vector>

#include "heads.h"
#include "lanes.h"
#include "random.h"

template <class I>
struct Graph {
  const int64_t* indptr;
  const I* indices;
  const I* edge_ids;
  const int64_t* blocks;
  int64_t num_blocks, num_rows, num_columns, num_entries;
  int64_t edge(int64_t entry) const { return edge_ids ? int64_t(edge_ids[entry]) : entry; }
};

// A group of at most W heads: which, and how its features lie in vectors.
template <class A, int W>
struct Group {
  typedef Lanes<A, W> Vector;
  typedef Lanes<Signed<A>, W> Places;
  static constexpr int kWidth = W;
  int64_t first_head, num_heads, channels, column, width;  // column: of the group's first feature in a row
  std::vector<int64_t> offset;                              // of each vector in the group's features, the last moved back
  std::vector<Places> head;                                 // of each lane of each vector
  std::vector<Places> taker;                                // for heads narrower than a vector: the lane that head h's sum is taken from
  bool has_whole_vectors, has_whole_heads;                  // heads of k · W channels; vectors of k heads

  Group(int64_t first_head, int64_t num_heads, int64_t channels)
      : first_head(first_head), num_heads(num_heads), channels(channels), column(first_head * channels), width(num_heads * channels),
        has_whole_vectors(channels % W == 0), has_whole_heads(W % channels == 0) {
    for (int64_t at = 0; at < width; at += W) {
      offset.push_back(at + W <= width ? at : width - W);
      Signed<A> heads[W], takers[W];
      for (int lane = 0; lane < W; ++lane) {
        heads[lane] = Signed<A>((offset.back() + lane) / channels);
        const int64_t place = lane * channels - offset.back();
        takers[lane] = Signed<A>(place >= 0 && place < W ? place : -1);
      }
      head.push_back(lanes_of(heads)), taker.push_back(lanes_of(takers));
    }
  }
  int64_t num_vectors() const { return int64_t(offset.size()); }
  static Places lanes_of(const Signed<A>* values) {
    Places lanes;
    memcpy(&lanes, values, sizeof lanes);
    return lanes;
  }

  // Sums over each head's channels: lane h has head h's. ``product(offset)`` is the vector of terms there.
  template <class Product>
  inline Vector sums(Product product) const {
    if (has_whole_vectors) return sums_of_whole_vectors(product);
    if (has_whole_heads) {
      if (channels == 8) return sums_of_whole_heads<8>(product);
      if (channels == 4) return sums_of_whole_heads<4>(product);
      if (channels == 2) return sums_of_whole_heads<2>(product);
      return sums_of_whole_heads<1>(product);
    }
    return sums_of_any(product);
  }
  template <class Product>
  inline Vector sums_of_whole_vectors(Product product) const {
    Vector result = splat<A, W>(A(0));
    for (int64_t h = 0; h < num_heads; ++h) {
      Vector sum = product(h * channels);
      for (int64_t c = W; c < channels; c += W) sum += product(h * channels + c);
      result = iota<A, W>() == Signed<A>(h) ? sum_groups<A, W, W>(sum) : result;
    }
    return result;
  }
  template <int C, class Product>
  inline Vector sums_of_whole_heads(Product product) const {
    Vector result = splat<A, W>(A(0));
    for (int64_t v = 0; v < num_vectors(); ++v)
      result = taker[v] >= 0 ? permute<A, W>(sum_groups<A, W, C>(product(offset[v])), taker[v]) : result;
    return result;
  }
  template <class Product>
  Vector sums_of_any(Product product) const {
    A lanes[W] = {};
    int64_t done = 0;
    for (int64_t v = 0; v < num_vectors(); ++v) {  // lanes that the vector before had are left out
      A terms[W];
      store<W>(terms, product(offset[v]));
      for (int64_t at = done; at < offset[v] + W; ++at) lanes[at / channels] += terms[at - offset[v]];
      done = offset[v] + W;
    }
    return load<W>(lanes);
  }
};

// Calls f(group) for heads in groups of at most W, of W as wide as the narrowest group's features allow.
template <class A, int W, class F>
void for_groups(int64_t num_heads, int64_t channels, F f) {
  const int64_t num_groups = (num_heads + W - 1) / W;
  if constexpr (W > 1) {
    if (num_heads / num_groups * channels < W) return for_groups<A, W / 2>(num_heads, channels, f);
  }
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t first = g * num_heads / num_groups, end = (g + 1) * num_heads / num_groups;
    f(Group<A, W>(first, end - first, channels));
  }
}

template <class A, int W>
inline Lanes<A, W> leaky(Lanes<A, W> z, A slope) {
  return z > splat<A, W>(A(0)) ? z : z * slope;
}
