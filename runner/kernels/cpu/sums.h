// A row's sum over its CSR entries, kept in registers.
//
// Legend: F features; W lanes of a vector, NV vectors of a pass over F.
#pragma once
#include "lanes.h"

typedef STORAGE S;
typedef INDEX I;
typedef Compute<S> A;

constexpr int kPrefetchAhead = 16;  // edges
constexpr int64_t kBank = 256;      // entries of a row that are summed before they join its total: long rows then round as short ones

template <int W, int NV>
struct Sums {
  Lanes<A, W> at[NV];
  inline void clear() {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) at[v] = splat<A, W>(A(0));
  }
  inline void add(const S* x, const int64_t* offset) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) at[v] += load<W>(x + offset[v]);
  }
  inline void add(const S* x, const int64_t* offset, A factor) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) at[v] += load<W>(x + offset[v]) * factor;
  }
  inline void add(const Sums& other) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) at[v] += other.at[v];
  }
};

// Sums entries of CSR: WEIGHTED says whether they have factors.
template <int W, int NV>
struct Entries {
  const I* indices;
  const S* weight;
  int64_t num_entries;
  const S* x;
  int64_t num_features;
  const int64_t* offset;
  bool is_far;  // X is too large for a core's own cache: its rows are asked for ahead

  const S* row_of_x(int64_t column) const { return x + column * num_features; }

  inline void foresee(int64_t entry) const {
    if (!is_far || entry + kPrefetchAhead >= num_entries) return;
    const S* later = row_of_x(indices[entry + kPrefetchAhead]) + offset[0];
#pragma GCC unroll 8
    for (int v = 0; v < NV; v += (64 / int(sizeof(S)) + W - 1) / W) __builtin_prefetch(later + v * W);
  }
  inline void add_some(int64_t begin, int64_t end, Sums<W, NV>& sums) const {
    for (int64_t k = begin; k < end; ++k) {
      foresee(k);
      if (WEIGHTED)
        sums.add(row_of_x(indices[k]), offset, value(weight + k));
      else
        sums.add(row_of_x(indices[k]), offset);
    }
  }
  inline void add(int64_t begin, int64_t end, Sums<W, NV>& sums) const {
    if (end - begin <= kBank) return add_some(begin, end, sums);
    for (int64_t at = begin; at < end; at += kBank) {
      Sums<W, NV> bank;
      bank.clear();
      add_some(at, end - at < kBank ? end : at + kBank, bank);
      sums.add(bank);
    }
  }
};

template <int W, int NV>
inline void store_row(const Sums<W, NV>& sums, S* row, const int64_t* offset) {
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) store<W>(row + offset[v], sums.at[v]);
}
