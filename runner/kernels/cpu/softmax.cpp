// Softmax of values per edge over the edges that share a destination, per head, and its backward.
//
// Legend: N rows, E edges, H heads.
#include "heads.h"
#include "lanes.h"
#include "parallel.h"

typedef STORAGE S;
typedef INDEX I;
typedef Compute<S> A;

namespace {

constexpr int64_t kPrefetchAhead = 24;  // edges: their ids may be anywhere

struct Problem {
  const int64_t* indptr;
  const I* edge_ids;
  int64_t num_entries, num_heads;
  int64_t at(int64_t entry) const { return (edge_ids ? int64_t(edge_ids[entry]) : entry) * num_heads; }
  inline void prefetch(const S* from, const S* to, int64_t entry) const {
    if (!edge_ids || entry + kPrefetchAhead >= num_entries) return;
    const int64_t later = at(entry + kPrefetchAhead);
    __builtin_prefetch(from + later);
    __builtin_prefetch(to + later, 1);
  }
  int64_t size() const { return num_entries * num_heads; }
};

// Heads [first, first + count) of one row, count <= W.
template <int W>
inline void softmax_row(const Problem& p, Tile<A, W>& tile, const S* logits, int64_t row, int64_t first, int64_t count, S* out) {
  const int64_t begin = p.indptr[row], n = p.indptr[row + 1] - begin;
  if (n == 0) return;
  tile.resize(n);
  if (tile.pitch == 1 && !p.edge_ids && p.num_heads == 1) {  // contiguous already
    for (int64_t k = 0; k < n; ++k) tile.row(0)[k] = value(logits + begin + k);
  } else {
    for (int64_t k = 0; k < n; ++k) {
      p.prefetch(logits, out, begin + k);
      tile.put(k, load_heads<W>(logits, p.at(begin + k) + first, count, p.size()));
    }
  }
  tile.pad(n, -std::numeric_limits<A>::infinity());
  const Lanes<A, W> total = tile.exponentiate(tile.high());
  tile.scale(splat<A, W>(A(1)) / total);
  for (int64_t k = 0; k < n; ++k) store_heads<W>(out + p.at(begin + k) + first, tile.get(k), count);
}

template <int W>
inline void softmax_backward_row(const Problem& p, const S* a, const S* da, int64_t row, int64_t first, int64_t count, S* dlogits) {
  Lanes<A, W> dot = splat<A, W>(A(0));
  for (int64_t k = p.indptr[row]; k < p.indptr[row + 1]; ++k) {
    const int64_t at = p.at(k) + first;
    p.prefetch(a, dlogits, k);
    if (p.edge_ids && k + kPrefetchAhead < p.num_entries) __builtin_prefetch(da + p.at(k + kPrefetchAhead));
    dot += load_heads<W>(a, at, count, p.size()) * load_heads<W>(da, at, count, p.size());
  }
  for (int64_t k = p.indptr[row]; k < p.indptr[row + 1]; ++k) {
    const int64_t at = p.at(k) + first;
    const Lanes<A, W> share = load_heads<W>(a, at, count, p.size()), grad = load_heads<W>(da, at, count, p.size());
    store_heads<W>(dlogits + at, share * (grad - dot), count);
  }
}

}  // namespace

extern "C" void edge_softmax(const int64_t* indptr, const I* edge_ids, const int64_t* blocks, int64_t num_blocks, int64_t num_entries,
                             const S* logits, int64_t num_heads, S* out, int num_threads) {
  constexpr int W = kLanes<S>;
  const Problem p{indptr, edge_ids, num_entries, num_heads};
  for_blocks(num_blocks, num_threads, [&](int64_t block) {
    Tile<A, W> tile(num_heads < W ? num_heads : W);
    for (int64_t row = blocks[block]; row < blocks[block + 1]; ++row)
      for (int64_t first = 0; first < num_heads; first += W)
        softmax_row<W>(p, tile, logits, row, first, num_heads - first < W ? num_heads - first : W, out);
  });
}

// dlogits = a · (da - sum over the destination's edges of a · da).
extern "C" void edge_softmax_backward(const int64_t* indptr, const I* edge_ids, const int64_t* blocks, int64_t num_blocks,
                                      int64_t num_entries, const S* a, const S* da, int64_t num_heads, S* dlogits, int num_threads) {
  const Problem p{indptr, edge_ids, num_entries, num_heads};
  with_width<kLanes<S>>(num_heads, [&](auto width) {
    constexpr int W = decltype(width)::value;
    for_blocks(num_blocks, num_threads, [&](int64_t block) {
      for (int64_t row = blocks[block]; row < blocks[block + 1]; ++row)
        for (int64_t first = 0; first < num_heads; first += W)
          softmax_backward_row<W>(p, a, da, row, first, num_heads - first < W ? num_heads - first : W, dlogits);
    });
  });
}
