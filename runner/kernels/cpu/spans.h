// The edges of some rows taken together, with values per head in tiles that whole vectors walk, and features gathered by them: what GAT's
// kernels are made of. For the STORAGE and INDEX that a source is built for.
//
// Legend: E edges, H heads, P heads a tile's row has room for (a power of two), C channels a head, D = H · C.
#pragma once
#include <memory>

#include "epilogue.h"
#include "head_groups.h"
#include "parallel.h"
#include "vectors.h"

typedef STORAGE S;
typedef INDEX I;
typedef Compute<S> A;

namespace {

constexpr int kWide = kLanes<S>;
typedef Lanes<A, kWide> Wide;
constexpr int64_t kTileLanes = 1024;   // of edges held at once: their tiles stay in the innermost cache
constexpr int64_t kPrefetchAhead = 8;  // edges: the hardware can't foresee a gather

// Edges of one row that are held in the tiles, from ``lane`` on; a row of more edges than fit comes in several.
struct Span {
  int64_t row, begin, count, lane;
};

template <int P>
inline Wide repeat(const A* from) {
  A lanes[kWide];
  for (int lane = 0; lane < kWide; lane += P) store<P>(lanes + lane, load<P>(from));
  return load<kWide>(lanes);
}

// Numbers per node of a group's heads, P a node side by side.
template <int P>
struct PerHead {
  const A* data;
  std::unique_ptr<A[]> copy;

  template <int W>
  PerHead(const S* from, int64_t num_nodes, int64_t num_heads, const Group<A, W>& g, int num_threads) {
    if constexpr (std::is_same<S, A>::value) {
      if (num_heads == P) {
        data = from;
        return;
      }
    }
    constexpr int64_t kNodes = 4096;
    copy.reset(new A[num_nodes * P]);
    data = copy.get();
    for_blocks((num_nodes + kNodes - 1) / kNodes, num_threads, [&](int64_t block) {
      for (int64_t node = block * kNodes; node < (block + 1) * kNodes && node < num_nodes; ++node)
        for (int64_t h = 0; h < P; ++h) copy[node * P + h] = h < g.num_heads ? value(from + node * num_heads + g.first_head + h) : A(0);
    });
  }
  // The node's numbers, over and over.
  Wide repeated(int64_t node) const { return repeat<P>(data + node * P); }
};

// The P numbers that lanes of the same head add up to, repeated.
template <int P>
inline Wide total_of(Wide lanes) {
  return fold<A, kWide>(lanes, P, kWide, [](Wide a, Wide b) { return a + b; });
}

// Calls f(at, only_edges) for the vectors of a tile that a span fills. Lanes behind its last edge aren't its: only_edges(x, otherwise) has
// ``otherwise`` there.
template <int P, class F>
inline void for_tile(const Span& span, F f) {
  const int64_t end = span.lane + span.count * P;
  int64_t at = span.lane;
  for (; at + kWide <= end; at += kWide) f(at, [](Wide x, Wide) { return x; });
  const auto is_edge = iota<A, kWide>() < splat<Signed<A>, kWide>(Signed<A>(end - at));
  if (at < end) f(at, [&](Wide x, Wide otherwise) { return is_edge ? x : otherwise; });
}

// Takes rows [begin, end) in batches whose edges fit the tiles. ``batch(spans, count)`` has whole rows; ``row(i)`` is called for longer ones.
template <int P, class Batch, class Row>
inline void for_batches(const Graph<I>& graph, int64_t begin, int64_t end, Batch batch, Row row) {
  constexpr int64_t kMostSpans = kTileLanes / kWide;
  Span spans[kMostSpans];
  int64_t count = 0, lane = 0;
  const auto flush = [&] {
    batch(spans, count);
    count = lane = 0;
  };
  for (int64_t i = begin; i < end; ++i) {
    const int64_t first = graph.indptr[i], length = graph.indptr[i + 1] - first;
    const int64_t lanes = (length * P + kWide - 1) / kWide * kWide;
    if (lanes > kTileLanes) {
      flush();
      row(i);
      continue;
    }
    if (lane + lanes > kTileLanes || count == kMostSpans) flush();
    spans[count++] = {i, first, length, lane};
    lane += lanes;
  }
  flush();
}

// Calls f(span) for the pieces of a long row.
template <int P, class F>
inline void for_pieces(const Graph<I>& graph, int64_t row, F f) {
  constexpr int64_t kMost = kTileLanes / P;
  for (int64_t first = graph.indptr[row]; first < graph.indptr[row + 1]; first += kMost)
    f(Span{row, first, graph.indptr[row + 1] - first < kMost ? graph.indptr[row + 1] - first : kMost, 0});
}

// The weights of the edges that are held, by edge and head; ``positive`` has those where key + query > 0, and 0 elsewhere.
struct Weights {
  A* all;
  A* positive;
};

// Multiplies the weights of a span by their factors of dropout.
template <int P>
inline void drop(const Graph<I>& graph, const Dropout& dropout, int64_t first_head, const Span& span, const Weights& weights) {
  for (int64_t k = 0; k < span.count; ++k) {
    const int64_t at = span.lane + k * P;
    const auto factor = dropout_factor<A, P>(dropout, dropout.row_key(graph.edge(span.begin + k)), first_head);
    store<P>(weights.all + at, load<P>(weights.all + at) * factor);
    store<P>(weights.positive + at, load<P>(weights.positive + at) * factor);
  }
}

// How many vectors a pass over the edges holds: narrow vectors are for groups of fewer features than a full one has lanes.
template <int W>
constexpr int kMostVectors = W == kWide ? kMaxVectors : 2;

// sum[d] = sum over a span's edges of weight · rows[d], and with kBoth positive[d] = the same with the positive weights; NV vectors of
// features. kWhole: each of them is of one head.
template <int W, int NV, bool kWhole, bool kBoth>
void accumulate_pass(const Group<A, W>& g, int64_t first, const I* indices, int64_t count, int64_t num_foreseen, Weights weights,
                     int64_t pitch, const S* rows, int64_t D, A* sum, A* positive) {
  typedef Lanes<A, W> Vector;
  Vector all[NV], above[NV];
  Lanes<Signed<A>, W> head[NV];
  int64_t offset[NV], one_head[NV];
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) {
    all[v] = above[v] = splat<A, W>(A(0)), head[v] = g.head[first + v], offset[v] = g.offset[first + v];
    one_head[v] = offset[v] / g.channels;
  }
  for (int64_t k = 0; k < count; ++k, weights.all += pitch, weights.positive += pitch) {
    if (k < num_foreseen) {
      const S* later = rows + int64_t(indices[k + kPrefetchAhead]) * D + offset[0];
#pragma GCC unroll 8
      for (int v = 0; v < NV; v += (64 / int(sizeof(S)) + W - 1) / W) __builtin_prefetch(later + v * W);
    }
    const S* x = rows + int64_t(indices[k]) * D;
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      const Vector feature = load<W>(x + offset[v]);
      const auto of_head = [&](const A* from) {
        return kWhole ? splat<A, W>(from[one_head[v]]) : permute<A, W>(load<W>(from), head[v]);
      };
      all[v] += feature * of_head(weights.all);
      if constexpr (kBoth) above[v] += feature * of_head(weights.positive);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) {
    store<W>(sum + offset[v], all[v]);
    if constexpr (kBoth) store<W>(positive + offset[v], above[v]);
  }
}

// Rows of features, gathered by the edges of a graph into sums [width of the group].
template <int W>
struct Gatherer {
  const Graph<I>& graph;
  const Group<A, W>& g;
  const S* rows;  // of the group's first feature
  int64_t D, pitch;

  template <bool kBoth>
  void accumulate(const Span& span, const Weights& weights, A* sum, A* positive) const {
    if (g.has_whole_vectors || g.num_heads == 1) return passes<kMostVectors<W>, true, kBoth>(span, weights, sum, positive);
    passes<kMostVectors<W>, false, kBoth>(span, weights, sum, positive);
  }

 private:
  template <int NV, bool kWhole, bool kBoth>
  void passes(const Span& span, const Weights& weights, A* sum, A* positive, int64_t first = 0) const {
    const int64_t left = g.num_vectors() - first;
    if constexpr (NV > 1) {
      if (left < NV) return passes<NV - 1, kWhole, kBoth>(span, weights, sum, positive, first);
    }
    accumulate_pass<W, NV, kWhole, kBoth>(g, first, graph.indices + span.begin, span.count,
                                          graph.num_entries - span.begin - kPrefetchAhead,
                                          {weights.all + span.lane, weights.positive + span.lane}, pitch, rows, D, sum, positive);
    if (left > NV) passes<kMostVectors<W>, kWhole, kBoth>(span, weights, sum, positive, first + NV);
  }
};

}  // namespace
