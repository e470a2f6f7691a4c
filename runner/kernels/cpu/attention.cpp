// Attention over a destination's edges in one pass, and its backward by recomputation; nothing of size E × H × C is stored.
//
// SCORE 0 GATv2: <vector[h], LeakyReLU(value[j, h] + query[i, h])>; 1 dot: scale · <key[j, h], query[i, h]>. (GAT's is in gat.cpp.)
// out[i] = sum of softmax(score) · dropout · value[j]. A destination keeps the largest score and the sum of exponentials of each head
// (rescaled when a later tile has a larger one), which is all that the backward needs to recompute.
//
// Scores and weights lie in vectors with a lane a head, features in vectors of W lanes whatever their heads: a permutation spreads the
// weights over the lanes of their heads. More heads than lanes are taken in groups, each an attention of its own.
//
// Legend: N rows, M columns, E edges, H heads, C channels a head, D = H · C. j → i.
#include "head_groups.h"
#include "lanes.h"
#include "parallel.h"
#include "epilogue.h"
#include "random.h"
#include "vectors.h"

typedef STORAGE S;
typedef INDEX I;
typedef Compute<S> A;

namespace {

enum { kGatV2, kDotProduct };
constexpr int64_t kTile = 128;        // edges whose scores are held at once
constexpr int64_t kPrefetchAhead = 8;  // edges: the hardware can't foresee a gather

struct Operands {
  const S* value;   // [M, D]
  const S* key;     // [M, D], dot
  const S* query;   // [N, D]
  const S* vector;  // [D], GATv2
  int64_t num_heads, channels;
  A slope, scale;
  Dropout dropout;
  int64_t width() const { return num_heads * channels; }
};

// sum[d] += term(k, offset, weight) over n edges, the weights of edge k spread over the lanes of their heads; NV vectors in registers.
template <int W, int NV, class Term>
inline void accumulate_pass(const Group<A, W>& g, int64_t first, int64_t n, Tile<A, W>& weights, const A* start, A* sum, Term term) {
  Lanes<A, W> held[NV];
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) held[v] = load<W>(start + g.offset[first + v]);
  for (int64_t k = 0; k < n; ++k) {
    const Lanes<A, W> weight = weights.get(k);
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) held[v] += term(k, g.offset[first + v], permute<A, W>(weight, g.head[first + v]));
  }
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) store<W>(sum + g.offset[first + v], held[v]);
}
template <int W, int NV, class Term>
inline void accumulate_passes(const Group<A, W>& g, int64_t first, int64_t count, int64_t n, Tile<A, W>& weights, const A* start, A* sum,
                              Term term) {
  if constexpr (NV > 1) {
    if (count < NV) return accumulate_passes<W, NV - 1>(g, first, count, n, weights, start, sum, term);
  }
  accumulate_pass<W, NV>(g, first, n, weights, start, sum, term);
}
template <int W, class Term>
void accumulate(const Group<A, W>& g, int64_t n, Tile<A, W>& weights, A* sum, std::vector<A>& scratch, Term term) {
  constexpr int64_t kMost = kMaxVectors;
  const A* start = sum;
  if (g.width % W && g.num_vectors() > kMost) {  // a lane that two passes visit must begin at the same value in both
    scratch.assign(sum, sum + g.width);
    start = scratch.data();
  }
  for (int64_t first = 0; first < g.num_vectors(); first += kMost)
    accumulate_passes<W, kMost>(g, first, g.num_vectors() - first, n, weights, start, sum, term);
}

// The factor of dropout of an edge's heads.
template <int W>
inline Lanes<A, W> dropout_of(const Operands& o, const Group<A, W>& g, int64_t edge) {
  return dropout_factor<A, W>(o.dropout, o.dropout.row_key(edge), g.first_head);
}

// Scores of edge j → i, a lane a head.
template <int W>
inline Lanes<A, W> score(const Operands& o, const Group<A, W>& g, int64_t j, int64_t i) {
  const int64_t D = o.width();
  const S* query = o.query + i * D + g.column;
  const S* there = (SCORE == kGatV2 ? o.value : o.key) + j * D + g.column;
  const S* vector = o.vector + g.column;
  return g.sums([&](int64_t at) {
    if constexpr (SCORE == kGatV2) return leaky<A, W>(load<W>(there + at) + load<W>(query + at), o.slope) * load<W>(vector + at);
    return load<W>(there + at) * load<W>(query + at) * o.scale;
  });
}

template <int W>
inline void prefetch_row(const S* rows, int64_t row, const Operands& o, const Group<A, W>& g) {
  const S* from = rows + row * o.width() + g.column;
  for (int64_t at = 0; at < g.width; at += 64 / int(sizeof(S))) __builtin_prefetch(from + at);
}

template <int W>
void forward_rows(const Graph<I>& graph, const Operands& o, const Group<A, W>& g, int64_t begin_row, int64_t end_row, S* out, A* high,
                  A* total) {
  typedef Lanes<A, W> Vector;
  const int64_t D = o.width();
  const A lowest = -std::numeric_limits<A>::infinity();
  Tile<A, W> tile(g.num_heads, kTile), kept(g.num_heads, kTile);  // apart: rows share vectors, and a store would hold up the next load
  std::vector<A> sum(g.width), scratch;
  const auto rescale = [&](Vector factor) {
    A factors[W];
    store<W>(factors, factor);
    for (int64_t d = 0; d < g.width; ++d) sum[d] *= factors[d / g.channels];
  };
  for (int64_t i = begin_row; i < end_row; ++i) {
    memset(sum.data(), 0, sum.size() * sizeof(A));
    Vector best = splat<A, W>(lowest), mass = splat<A, W>(A(0));
    for (int64_t first = graph.indptr[i]; first < graph.indptr[i + 1]; first += kTile) {
      const int64_t count = graph.indptr[i + 1] - first < kTile ? graph.indptr[i + 1] - first : kTile;
      const I* indices = graph.indices + first;
      tile.resize(count);
      for (int64_t k = 0; k < count; ++k) {
        if (first + k + kPrefetchAhead < graph.num_entries) {
          const int64_t later = indices[k + kPrefetchAhead];
          prefetch_row<W>(o.value, later, o, g);
          if (SCORE == kDotProduct) prefetch_row<W>(o.key, later, o, g);
        }
        tile.put(k, score<W>(o, g, indices[k], i));
      }
      tile.pad(count, lowest);
      const Vector highest = larger<A, W>(best, tile.high());
      const Vector shift = highest == lowest ? splat<A, W>(A(0)) : highest;  // scores that are all -inf weigh nothing yet
      if (first != graph.indptr[i]) {
        const Vector shrink = exponential<W>(best - shift);
        mass *= shrink;
        rescale(shrink);
      }
      best = highest;
      mass += tile.exponentiate(shift);
      if (o.dropout.is_on())
        for (int64_t k = 0; k < count; ++k) kept.put(k, tile.get(k) * dropout_of<W>(o, g, graph.edge(first + k)));
      accumulate<W>(g, count, o.dropout.is_on() ? kept : tile, sum.data(), scratch, [&](int64_t k, int64_t at, Vector weight) {
        return load<W>(o.value + int64_t(indices[k]) * D + g.column + at) * weight;
      });
    }
    const bool is_empty = graph.indptr[i] == graph.indptr[i + 1];
    if (!is_empty) rescale(splat<A, W>(A(1)) / mass);
    for_vectors<W>(g.width, [&](int64_t at) { store<W>(out + i * D + g.column + at, load<W>(sum.data() + at)); });
    store_heads<W>(high + i * o.num_heads + g.first_head, is_empty ? mass : best, g.num_heads);
    store_heads<W>(total + i * o.num_heads + g.first_head, mass, g.num_heads);
  }
}

// What the backward reads beside the operands. ``stats`` [N, 3, H] has what it reads of a destination side by side: the largest score,
// 1 / sum of exponentials, <dout, out>.
struct Saved {
  const S* dout;
  A* stats;
  A* dscore;  // [E, H], gradient of the score (dot: before its scale), by entry of the transposed graph
};
enum { kHigh, kInverse, kDot, kNumStats };

template <int W>
void fill_stats(const Operands& o, const Saved& s, const S* out, const A* high, const A* total, int64_t num_rows, int num_threads) {
  constexpr int64_t kRows = 512;
  const int64_t H = o.num_heads;
  for_blocks((num_rows + kRows - 1) / kRows, num_threads, [&](int64_t block) {
    for (int64_t i = block * kRows; i < (block + 1) * kRows && i < num_rows; ++i)
      for (int64_t h = 0; h < H; ++h) {
        const int64_t at = i * o.width() + h * o.channels;
        A* stats = s.stats + i * kNumStats * H + h;
        stats[kHigh * H] = high[i * H + h];
        stats[kInverse * H] = A(1) / total[i * H + h];
        stats[kDot * H] = dot<W>(s.dout + at, out + at, o.channels);
      }
  });
}

// The gradients that sources [begin_row, end_row) gather from their out-edges: of value, and of key (dot).
template <int W>
void backward_rows(const Graph<I>& turned, int64_t num_destinations, const Operands& o, const Group<A, W>& g, const Saved& s, int64_t begin_row,
                   int64_t end_row, S* dvalue, S* dkey) {
  typedef Lanes<A, W> Vector;
  const int64_t H = o.num_heads, D = o.width(), num_stats = num_destinations * kNumStats * H;
  Tile<A, W> exponentials(g.num_heads, kTile), weights(g.num_heads, kTile), grads(g.num_heads, kTile);
  std::vector<A> sum(g.width), key_sum(SCORE == kDotProduct ? g.width : 0), scratch;
  const auto stat = [&](int64_t i, int which) {
    return load_heads<W>(s.stats, (i * kNumStats + which) * H + g.first_head, g.num_heads, num_stats);
  };
  for (int64_t j = begin_row; j < end_row; ++j) {
    const S* here = o.value + j * D + g.column;
    memset(sum.data(), 0, sum.size() * sizeof(A));
    if constexpr (SCORE == kDotProduct) memset(key_sum.data(), 0, key_sum.size() * sizeof(A));
    for (int64_t first = turned.indptr[j]; first < turned.indptr[j + 1]; first += kTile) {
      const int64_t count = turned.indptr[j + 1] - first < kTile ? turned.indptr[j + 1] - first : kTile;
      const I* indices = turned.indices + first;
      exponentials.resize(count);
      for (int64_t k = 0; k < count; ++k) {
        if (first + k + kPrefetchAhead < turned.num_entries) {
          const int64_t later = indices[k + kPrefetchAhead];
          prefetch_row<W>(s.dout, later, o, g);
          prefetch_row<W>(o.query, later, o, g);
          for (int64_t at = 0; at < kNumStats * H; at += 64 / int64_t(sizeof(A))) __builtin_prefetch(s.stats + later * kNumStats * H + at);
        }
        exponentials.put(k, score<W>(o, g, j, indices[k]) - stat(indices[k], kHigh));
      }
      exponentials.pad(count, A(0));
      exponentials.exponentiate(splat<A, W>(A(0)));
      for (int64_t k = 0; k < count; ++k) {
        const int64_t i = indices[k];
        const S* grad_out = s.dout + i * D + g.column;
        const Vector share = exponentials.get(k) * stat(i, kInverse);
        Vector dshare = g.sums([&](int64_t at) { return load<W>(grad_out + at) * load<W>(here + at); }), weight = share;
        if (o.dropout.is_on()) {
          const Vector kept = dropout_of<W>(o, g, turned.edge(first + k));
          dshare *= kept, weight *= kept;
        }
        const Vector dscore = share * (dshare - stat(i, kDot)) * (SCORE == kDotProduct ? o.scale : A(1));
        store_heads<W>(s.dscore + (first + k) * H + g.first_head, dscore, g.num_heads);
        weights.put(k, weight);
        grads.put(k, dscore);
      }
      accumulate<W>(g, count, weights, sum.data(), scratch, [&](int64_t k, int64_t at, Vector weight) {
        return load<W>(s.dout + int64_t(indices[k]) * D + g.column + at) * weight;
      });
      if constexpr (SCORE == kGatV2)
        accumulate<W>(g, count, grads, sum.data(), scratch, [&](int64_t k, int64_t at, Vector grad) {
          const Vector z = load<W>(here + at) + load<W>(o.query + int64_t(indices[k]) * D + g.column + at);
          return load<W>(o.vector + g.column + at) * (z > splat<A, W>(A(0)) ? grad : grad * o.slope);
        });
      if constexpr (SCORE == kDotProduct)
        accumulate<W>(g, count, grads, key_sum.data(), scratch, [&](int64_t k, int64_t at, Vector grad) {
          return load<W>(o.query + int64_t(indices[k]) * D + g.column + at) * grad;
        });
    }
    for_vectors<W>(g.width, [&](int64_t at) { store<W>(dvalue + j * D + g.column + at, load<W>(sum.data() + at)); });
    if constexpr (SCORE == kDotProduct)
      for_vectors<W>(g.width, [&](int64_t at) { store<W>(dkey + j * D + g.column + at, load<W>(key_sum.data() + at)); });
  }
}

// GATv2's gradients of query and vector for rows [begin_row, end_row), from dscore (``edge_ids`` says where an entry's lies); the vector's is
// added to vector_sum [D], in fp64 since every edge of the graph adds to it.
template <int W>
void destination_rows(const Graph<I>& graph, const Operands& o, const Group<A, W>& g, const A* dscore, int64_t begin_row, int64_t end_row,
                      S* dquery, double* vector_sum) {
  typedef Lanes<A, W> Vector;
  const int64_t H = o.num_heads, D = o.width();
  Tile<A, W> grads(g.num_heads, kTile);
  std::vector<A> sum(g.width), row_vector_sum(g.width), scratch;
  for (int64_t i = begin_row; i < end_row; ++i) {
    memset(row_vector_sum.data(), 0, row_vector_sum.size() * sizeof(A));
    const S* here = o.query + i * D + g.column;
    memset(sum.data(), 0, sum.size() * sizeof(A));
    for (int64_t first = graph.indptr[i]; first < graph.indptr[i + 1]; first += kTile) {
      const int64_t count = graph.indptr[i + 1] - first < kTile ? graph.indptr[i + 1] - first : kTile;
      const I* indices = graph.indices + first;
      for (int64_t k = 0; k < count; ++k) {
        if (first + k + kPrefetchAhead < graph.num_entries) {
          prefetch_row<W>(o.value, indices[k + kPrefetchAhead], o, g);
          __builtin_prefetch(dscore + graph.edge(first + k + kPrefetchAhead) * H);
        }
        grads.put(k, load_heads<W>(dscore, graph.edge(first + k) * H + g.first_head, g.num_heads, graph.num_entries * H));
      }
      const auto input = [&](int64_t k, int64_t at) { return load<W>(o.value + int64_t(indices[k]) * D + g.column + at) + load<W>(here + at); };
      accumulate<W>(g, count, grads, sum.data(), scratch, [&](int64_t k, int64_t at, Vector grad) {
        return load<W>(o.vector + g.column + at) * (input(k, at) > splat<A, W>(A(0)) ? grad : grad * o.slope);
      });
      accumulate<W>(g, count, grads, row_vector_sum.data(), scratch, [&](int64_t k, int64_t at, Vector grad) {
        return leaky<A, W>(input(k, at), o.slope) * grad;
      });
    }
    for (int64_t d = 0; d < g.width; ++d) vector_sum[g.column + d] += row_vector_sum[d];
    for_vectors<W>(g.width, [&](int64_t at) { store<W>(dquery + i * D + g.column + at, load<W>(sum.data() + at)); });
  }
}

}  // namespace

extern "C" void attention(const int64_t* indptr, const I* indices, const I* edge_ids, const int64_t* blocks, int64_t num_blocks,
                          int64_t num_rows, int64_t num_columns, int64_t num_entries, const S* value, const S* key, const S* query,
                          const S* vector, int64_t num_heads, int64_t channels, double slope, double scale, double dropout,
                          int64_t seed, S* out, A* high, A* total, int num_threads) {
  const Graph<I> graph{indptr, indices, edge_ids, blocks, num_blocks, num_rows, num_columns, num_entries};
  const Operands o{value, key, query, vector, num_heads, channels, A(slope), A(scale), Dropout(dropout, seed)};
  for_groups<A, kLanes<S>>(num_heads, channels, [&](auto g) {
    for_blocks(num_blocks, num_threads,
               [&](int64_t block) { forward_rows(graph, o, g, blocks[block], blocks[block + 1], out, high, total); });
  });
}

// ``indptr`` to ``num_blocks`` are of the transposed graph; num_rows and num_columns of the graph.
extern "C" void attention_backward_sources(const int64_t* indptr, const I* indices, const I* edge_ids, const int64_t* blocks,
                                           int64_t num_blocks, int64_t num_rows, int64_t num_columns, int64_t num_entries,
                                           const S* value, const S* key, const S* query, const S* vector, int64_t num_heads,
                                           int64_t channels, double slope, double scale, double dropout, int64_t seed, const S* out,
                                           const S* dout, const A* high, const A* total, A* stats, A* dscore, S* dvalue, S* dkey,
                                           int num_threads) {
  const Graph<I> turned{indptr, indices, edge_ids, blocks, num_blocks, num_columns, num_rows, num_entries};
  const Operands o{value, key, query, vector, num_heads, channels, A(slope), A(scale), Dropout(dropout, seed)};
  const Saved s{dout, stats, dscore};
  with_width<kLanes<S>>(channels, [&](auto width) { fill_stats<decltype(width)::value>(o, s, out, high, total, num_rows, num_threads); });
  for_groups<A, kLanes<S>>(num_heads, channels, [&](auto g) {
    for_blocks(num_blocks, num_threads,
               [&](int64_t block) { backward_rows(turned, num_rows, o, g, s, blocks[block], blocks[block + 1], dvalue, dkey); });
  });
}

// The vector's gradient comes in num_parts partial sums of neighbouring rows, so that its order doesn't depend on the threads.
extern "C" void attention_backward_destinations(const int64_t* indptr, const I* indices, const I* edge_ids, const int64_t* blocks,
                                                int64_t num_blocks, int64_t num_rows, int64_t num_columns, int64_t num_entries,
                                                const S* value, const S* query, const S* vector, int64_t num_heads, int64_t channels,
                                                double slope, const A* dscore, S* dquery, double* dvector_parts, int64_t num_parts,
                                                int num_threads) {
  const Graph<I> graph{indptr, indices, edge_ids, blocks, num_blocks, num_rows, num_columns, num_entries};
  const Operands o{value, nullptr, query, vector, num_heads, channels, A(slope), A(1), Dropout(0, 0)};
  for_groups<A, kLanes<S>>(num_heads, channels, [&](auto g) {
    for_blocks(num_parts, num_threads, [&](int64_t part) {
      destination_rows(graph, o, g, dscore, blocks[part * num_blocks / num_parts], blocks[(part + 1) * num_blocks / num_parts], dquery,
                       dvector_parts + part * o.width());
    });
  });
}
