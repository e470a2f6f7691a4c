// Y = epilogue(row_scale · reduce over a destination's edges of weight · col_scale[source] · X[source]), a row at a time.
//
// A row of Y stays in registers while its edges are walked.
// Built for one STORAGE (float, double, bf16), INDEX (int32_t, int64_t), REDUCE (0 sum, 1 max, 2 min) and WEIGHTING (0 none, 1 a factor an
// edge, 2 a weight per edge and head, 3 a weight per edge and feature), each a library of its own: what isn't used isn't compiled.
//
// Legend: N rows, M columns, E edges, F features, H heads, C = F / H channels a head.
#include "epilogue.h"
#include "lanes.h"
#include "parallel.h"
#include "vectors.h"

typedef STORAGE S;
typedef INDEX I;
typedef Compute<S> A;

namespace {

constexpr int64_t kTile = 256;       // edges whose factors are prepared at once
constexpr int kPrefetchAhead = 16;   // edges
constexpr int64_t kCoreCacheBytes = 1 << 19;

enum { kNone, kPerEdge, kPerHead, kPerChannel };

// Narrow vectors are for rows (or heads) of fewer features than a full vector has lanes: two of them are enough, but for many heads.
template <int W>
constexpr int kMaxLength = W == kLanes<S> || WEIGHTING == kPerHead ? kMaxVectors : 2;

struct Problem {
  const int64_t* indptr;
  const I* indices;
  const I* edge_ids;  // null: entry k is edge k
  const int64_t* blocks;
  int64_t num_blocks;
  const S* x;  // [M, F], its rows x_stride apart
  int64_t num_columns;
  int64_t x_stride;
  int64_t num_features;
  const S* weight;  // [E, H] or null
  int64_t num_heads;
  const S* col_scale;  // [M] or null
  S* y;
  I* arg;  // [N, F], max and min: the entry that was taken, -1 for none; or null
  Epilogue<S> epilogue;
  bool is_far;  // whether X is too large for a core's own cache
};

inline void prepare_factors(const Problem& p, int64_t begin, int64_t count, A* factor) {
  if constexpr (WEIGHTING == kPerEdge) {
    for (int64_t k = 0; k < count; ++k) {
      A f = p.weight ? value(p.weight + (p.edge_ids ? int64_t(p.edge_ids[begin + k]) : begin + k)) : A(1);
      factor[k] = p.col_scale ? f * value(p.col_scale + p.indices[begin + k]) : f;
    }
  } else if (WEIGHTING != kNone && p.col_scale) {
    for (int64_t k = 0; k < count; ++k) factor[k] = value(p.col_scale + p.indices[begin + k]);
  }
}

template <int W>
inline Lanes<A, W> message(const Problem& p, const S* x, const S* weight, A factor, int64_t offset, int64_t head) {
  Lanes<A, W> m = load<W>(x + offset);
  if constexpr (WEIGHTING == kPerEdge) return m * factor;
  if constexpr (WEIGHTING == kPerHead) m = m * value(weight + head);
  if constexpr (WEIGHTING == kPerChannel) m = m * load<W>(weight + offset);
  if constexpr (WEIGHTING == kPerHead || WEIGHTING == kPerChannel) return p.col_scale ? m * factor : m;
  return m;
}

// The state of a row: sums, or the best so far and the entries that attain it.
template <int W, int NV>
struct Row {
  typedef Lanes<A, W> Values;
  typedef Lanes<Signed<A>, W> Places;
  Values values[NV];
  Places places[NV];
  inline void begin() {
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) {
      const A worst = std::numeric_limits<A>::infinity();
      values[v] = splat<A, W>(REDUCE == 0 ? A(0) : REDUCE == 1 ? -worst : worst);
      places[v] = Places{};
    }
  }
  inline void take(int v, Values m, Signed<A> place) {
    if constexpr (REDUCE == 0) {
      values[v] += m;
    } else {  // the first entry that attains it is kept; a NaN is taken and stays
      auto better = (REDUCE == 1 ? m > values[v] : m < values[v]) | (m != m);
      values[v] = better ? m : values[v];
      places[v] = better ? splat<Signed<A>, W>(place) : places[v];
    }
  }
};

template <int W>
inline void store_places(I* arg, Lanes<Signed<A>, W> places, int64_t begin, bool is_empty) {
  I taken[W];
  for (int lane = 0; lane < W; ++lane) {
    int64_t place;
    if constexpr (W == 1)
      place = places;
    else
      place = places[lane];
    taken[lane] = is_empty ? I(-1) : I(begin + place);
  }
  memcpy(arg, taken, sizeof taken);
}

// Out of line, and once for all lengths of a pass: it is long, and the fast path doesn't take it.
template <int W>
__attribute__((noinline)) void finish(const Problem& p, const Vectors& vectors, const Lanes<A, W>* values,
                                      int64_t row, bool is_empty) {
  for (int v = 0; v < vectors.count; ++v)
    p.epilogue.template finish<W>(p.y + row * p.num_features + vectors.offset[v], is_empty ? splat<A, W>(A(0)) : values[v],
                                  row, vectors.offset[v]);
}

// Fetches what the entry kPrefetchAhead further on will read: the hardware can't foresee a gather.
template <int W, int NV>
inline void prefetch(const Problem& p, const S* x, int64_t entry) {
  const S* row = x + int64_t(p.indices[entry]) * p.x_stride;
#pragma GCC unroll 16
  for (int v = 0; v < NV; v += (64 / int(sizeof(S)) + W - 1) / W) __builtin_prefetch(row + v * W);
  if constexpr (WEIGHTING == kPerHead || WEIGHTING == kPerChannel)
    if (p.edge_ids) __builtin_prefetch(p.weight + int64_t(p.edge_ids[entry]) * p.num_heads);
}

template <int W, int NV>
void rows(const Problem& p, const Vectors& vectors, int64_t first_row, int64_t end_row) {
  A factor[kTile];
  const S* first_x = p.x + vectors.offset[0];
  const int64_t prefetch_end = p.is_far ? p.indptr[end_row] - kPrefetchAhead : 0;
  for (int64_t row = first_row; row < end_row; ++row) {
    const int64_t begin = p.indptr[row], end = p.indptr[row + 1];
    Row<W, NV> state;
    state.begin();
    for (int64_t tile = begin, tile_end; tile < end; tile = tile_end) {
      tile_end = WEIGHTING == kNone || end - tile < kTile ? end : tile + kTile;
      prepare_factors(p, tile, tile_end - tile, factor);
      for (int64_t entry = tile; entry < tile_end; ++entry) {
        if (entry < prefetch_end) prefetch<W, NV>(p, first_x, entry + kPrefetchAhead);
        const S* x = p.x + int64_t(p.indices[entry]) * p.x_stride;
        const S* weight = nullptr;
        if constexpr (WEIGHTING == kPerHead || WEIGHTING == kPerChannel)
          weight = p.weight + (p.edge_ids ? int64_t(p.edge_ids[entry]) : entry) * p.num_heads;
#pragma GCC unroll 16
        for (int v = 0; v < NV; ++v)
          state.take(v, message<W>(p, x, weight, factor[entry - tile], vectors.offset[v], vectors.head[v]),
                     Signed<A>(entry - begin));
      }
    }
    S* y = p.y + row * p.num_features;
    if (begin == end || !p.epilogue.is_identity) {
      finish<W>(p, vectors, state.values, row, begin == end);
    } else {
#pragma GCC unroll 16
      for (int v = 0; v < NV; ++v) store<W>(y + vectors.offset[v], state.values[v]);
    }
    if (REDUCE != 0 && p.arg) {
      for (int v = 0; v < NV; ++v)
        store_places<W>(p.arg + row * p.num_features + vectors.offset[v], state.places[v], begin, begin == end);
    }
  }
}

template <int W, int NV>
void pass(const Problem& p, const Vectors& vectors, int64_t first_row, int64_t end_row) {
  if constexpr (NV > 1) {
    if (vectors.count < NV) return pass<W, NV - 1>(p, vectors, first_row, end_row);
  }
  rows<W, NV>(p, vectors, first_row, end_row);
}

// Walks every row's edges for features [first, end).
template <int W>
void run_features(const Problem& p, int64_t first, int64_t end, int num_threads) {
  const Cut<W, kMaxLength<W>> cut(first, end, WEIGHTING == kPerHead ? p.num_heads : 1);
  for_blocks(p.num_blocks, num_threads, [&](int64_t block) {
    for (int64_t at = 0; at < cut.num_vectors; at += cut.length) {
      const Vectors vectors = cut.vectors(at);
      pass<W, kMaxLength<W>>(p, vectors, p.blocks[block], p.blocks[block + 1]);
    }
  });
}

// Copies features [first, end) of X side by side.
void pack(const Problem& p, int64_t first, int64_t end, S* packed, int num_threads) {
  constexpr int64_t kRows = 1024;
  const int64_t width = end - first;
  for_blocks((p.num_columns + kRows - 1) / kRows, num_threads, [&](int64_t block) {
    const int64_t end_row = block * kRows + kRows < p.num_columns ? block * kRows + kRows : p.num_columns;
    for (int64_t row = block * kRows; row < end_row; ++row)
      memcpy(packed + row * width, p.x + row * p.x_stride + first, size_t(width) * sizeof(S));
  });
}

// With room to pack, features are taken in slices: a slice of X is copied side by side and gathered from alone. The indices are read again
// for each slice, but X is read from memory once, where gathering whole rows that don't fit the cache reads it once an edge. (A slice in
// place wouldn't do: rows a power of two apart share cache sets.)
template <int W>
void run(Problem p, S* packed, int64_t slice, int num_threads) {
  if (packed == nullptr) return run_features<W>(p, 0, p.num_features, num_threads);
  const S* x = p.x;
  const int64_t stride = p.x_stride;
  for (int64_t first = 0, end; first < p.num_features; first = end) {
    end = p.num_features - first < slice + W ? p.num_features : first + slice;
    p.x = x, p.x_stride = stride;
    pack(p, first, end, packed, num_threads);
    p.x = packed - first, p.x_stride = end - first;
    run_features<W>(p, first, end, num_threads);
  }
}

}  // namespace

extern "C" void spmm(const int64_t* indptr, const I* indices, const I* edge_ids, const int64_t* blocks, int64_t num_blocks,
                     const S* x, int64_t num_columns, int64_t x_stride, int64_t num_features, const S* weight, int64_t num_heads,
                     const S* row_scale, const S* col_scale, const S* bias, int activation, double slope, double dropout,
                     int64_t seed, S* y, I* arg,
                     S* packed, int64_t slice, int num_threads) {
  const Problem p{indptr, indices, edge_ids, blocks, num_blocks, x, num_columns, x_stride, num_features, weight, num_heads, col_scale,
                  y, arg, Epilogue<S>(row_scale, bias, activation, slope, dropout, seed),
                  num_columns * num_features * int64_t(sizeof(S)) > kCoreCacheBytes};
  with_width<kLanes<S>>(WEIGHTING == kPerHead ? num_features / num_heads : num_features,
                        [&](auto width) { run<decltype(width)::value>(p, packed, slice, num_threads); });
}
