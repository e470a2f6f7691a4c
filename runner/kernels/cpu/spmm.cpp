// Y = epilogue(row_scale · reduce over a destination's edges of weight · col_scale[source] · X[source]), a row at a time.
//
// A row of Y stays in registers while its edges are walked. A weight per head is spread over the lanes of its head by a permutation.
//
// Built for one STORAGE (float, double, bf16), INDEX (int32_t, int64_t), REDUCE (0 sum, 1 max, 2 min) and WEIGHTING (0 none, 1 a factor an
// edge, 2 a weight per edge and head, 3 a weight per edge and feature) and PLACES (1: max and min say which entry they took), each a library
// of its own: what isn't used isn't compiled.
//
// Legend: N rows, M columns, E edges, F features, H heads, C = F / H channels a head.
#include "epilogue.h"
#include "heads.h"
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

// Narrow vectors are for rows of fewer features than a full vector has lanes: two of them are enough.
template <int W>
constexpr int kMaxLength = W == kLanes<S> ? kMaxVectors : 2;

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
  I* places;  // [N, F], with PLACES: the entry that was taken, -1 for none
  Epilogue<S> epilogue;
  int64_t num_weights;  // E · H
  bool is_far;          // whether X is too large for a core's own cache
};

// Heads [first, first + count), at most W: where the weights of a pass lie, and whose each lane of each of its vectors is.
template <int W>
struct Heads {
  int64_t first, count;
  Lanes<Signed<A>, W> of_lane[kMaxVectors];

  void assign(const Vectors& vectors, int64_t channels) {
    for (int v = 0; v < vectors.count; ++v) {
      Signed<A> lanes[W];
      for (int lane = 0; lane < W; ++lane) lanes[lane] = Signed<A>((vectors.offset[v] + lane) / channels - first);
      memcpy(&of_lane[v], lanes, sizeof lanes);
    }
  }
};

template <int W>
struct Pass {
  Vectors vectors;
  Heads<W> heads;  // with kPerHead
};

// Returns the factors of ``count`` edges from entry ``begin``: where they lie, or in ``room``.
inline const A* factors_of(const Problem& p, int64_t begin, int64_t count, A* room) {
  if (WEIGHTING == kPerEdge && std::is_same<S, A>::value) {
    if (p.weight && !p.edge_ids && !p.col_scale) return reinterpret_cast<const A*>(p.weight + begin);
  }
  if constexpr (WEIGHTING == kPerEdge) {
    for (int64_t k = 0; k < count; ++k) {
      A f = p.weight ? value(p.weight + (p.edge_ids ? int64_t(p.edge_ids[begin + k]) : begin + k)) : A(1);
      room[k] = p.col_scale ? f * value(p.col_scale + p.indices[begin + k]) : f;
    }
  } else if (WEIGHTING != kNone && p.col_scale) {
    for (int64_t k = 0; k < count; ++k) room[k] = value(p.col_scale + p.indices[begin + k]);
  }
  return room;
}

// The weights of an entry's edge, as a pass needs them.
template <int W>
struct EdgeWeights {
  const S* row = nullptr;       // with kPerChannel
  Lanes<A, W> of_heads = {};    // with kPerHead
  A factor = A(1);

  EdgeWeights(const Problem& p, const Pass<W>& pass, int64_t entry, const A* factor_of_entry) {
    if constexpr (WEIGHTING == kPerHead || WEIGHTING == kPerChannel) {
      const int64_t at = (p.edge_ids ? int64_t(p.edge_ids[entry]) : entry) * p.num_heads;
      if constexpr (WEIGHTING == kPerChannel)
        row = p.weight + at;
      else
        of_heads = load_heads<W>(p.weight, at + pass.heads.first, pass.heads.count, p.num_weights);
    }
    if constexpr (WEIGHTING != kNone) factor = *factor_of_entry;
  }
};

template <int W>
inline Lanes<A, W> message(const Problem& p, const Pass<W>& pass, const S* x, const EdgeWeights<W>& weights, int v) {
  Lanes<A, W> m = load<W>(x + pass.vectors.offset[v]);
  if constexpr (WEIGHTING == kPerEdge) return m * weights.factor;
  if constexpr (WEIGHTING == kPerHead) m = m * permute<A, W>(weights.of_heads, pass.heads.of_lane[v]);
  if constexpr (WEIGHTING == kPerChannel) m = m * load<W>(weights.row + pass.vectors.offset[v]);
  if constexpr (WEIGHTING == kPerHead || WEIGHTING == kPerChannel) return p.col_scale ? m * weights.factor : m;
  return m;
}

// The best of a row so far and, with PLACES, the entries that attain it.
//
// Without PLACES a maximum is one instruction, which loses NaN; ``trace`` sums the same values, so that a row with one is found afterwards.
template <int W, int NV>
struct Row {
  typedef Lanes<A, W> Values;
  typedef Lanes<Signed<A>, W> Places;
  Values values[NV];
  Values trace;
  Places places[PLACES ? NV : 1];
  inline void begin() {
    const A worst = std::numeric_limits<A>::infinity();
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) {
      values[v] = splat<A, W>(REDUCE == 1 ? -worst : worst);
      if constexpr (PLACES) places[v] = Places{};
    }
    trace = splat<A, W>(A(0));
  }
  inline void take(int v, Values m, Signed<A> place) {
    if constexpr (PLACES) {  // the first entry that attains it is kept, also a NaN
      auto better = (REDUCE == 1 ? m > values[v] : m < values[v]) | ((m != m) & (values[v] == values[v]));
      values[v] = better ? m : values[v];
      places[v] = better ? splat<Signed<A>, W>(place) : places[v];
    } else {
      values[v] = REDUCE == 1 ? maximum<A, W>(m, values[v]) : -maximum<A, W>(-m, -values[v]);
      trace += m;
    }
  }
  inline void join(const Row& other) {
    for (int v = 0; v < NV; ++v)
      values[v] = REDUCE == 1 ? maximum<A, W>(other.values[v], values[v]) : -maximum<A, W>(-other.values[v], -values[v]);
    trace += other.trace;
  }
  inline bool may_hold_nan() const {  // infinities of both signs give a false alarm, which costs time only
    if constexpr (PLACES) return false;
    const A sum = sum_of<A, W>(trace);
    return sum != sum;
  }
};

template <int W>
inline void store_places(I* to, Lanes<Signed<A>, W> places, int64_t begin, bool is_empty) {
  I taken[W];
  for (int lane = 0; lane < W; ++lane) {
    int64_t place;
    if constexpr (W == 1)
      place = places;
    else
      place = places[lane];
    taken[lane] = is_empty ? I(-1) : I(begin + place);
  }
  memcpy(to, taken, sizeof taken);
}

// Out of line, and once for all lengths of a pass: it is long, and the fast path doesn't take it.
template <int W>
__attribute__((noinline)) void finish(const Problem& p, const Vectors& vectors, const Lanes<A, W>* values, int64_t row, bool is_empty) {
  for (int v = 0; v < vectors.count; ++v)
    p.epilogue.template finish<W>(p.y + row * p.num_features + vectors.offset[v], is_empty ? splat<A, W>(A(0)) : values[v], row,
                                  vectors.offset[v]);
}

// Fetches what the entry kPrefetchAhead further on will read: the hardware can't foresee a gather.
template <int W, int NV>
inline void prefetch(const Problem& p, const Pass<W>& pass, int64_t entry) {
  if constexpr (WEIGHTING == kPerHead || WEIGHTING == kPerChannel)
    if (p.edge_ids) __builtin_prefetch(p.weight + int64_t(p.edge_ids[entry]) * p.num_heads);
  if (!p.is_far) return;
  const S* row = p.x + int64_t(p.indices[entry]) * p.x_stride + pass.vectors.offset[0];
#pragma GCC unroll 16
  for (int v = 0; v < NV; v += (64 / int(sizeof(S)) + W - 1) / W) __builtin_prefetch(row + v * W);
}

// Calls take(vector, message, entry, chain) for entries [tile, tile_end); neighbouring entries have different chains of NUM_CHAINS, so that
// one need not wait for the other's sum.
template <int W, int NV, int NUM_CHAINS, class Take>
inline void walk(const Problem& p, const Pass<W>& pass, int64_t tile, int64_t tile_end, int64_t prefetch_end, const A* factors,
                 Take take) {
  const auto step = [&](int64_t entry, auto chain) {
    if (entry < prefetch_end) prefetch<W, NV>(p, pass, entry + kPrefetchAhead);
    const S* x = p.x + int64_t(p.indices[entry]) * p.x_stride;
    const EdgeWeights<W> weights(p, pass, entry, factors + (entry - tile));
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) take(v, message<W>(p, pass, x, weights, v), entry, chain);
  };
  int64_t entry = tile;
  if constexpr (NUM_CHAINS == 2)
    for (; entry + 2 <= tile_end; entry += 2) {
      step(entry, std::integral_constant<int, 0>{});
      step(entry + 1, std::integral_constant<int, 1>{});
    }
  for (; entry < tile_end; ++entry) step(entry, std::integral_constant<int, 0>{});
}

// Takes the NaN of a row that has some: a value that is no number beats all others.
template <int W, int NV>
__attribute__((noinline)) void take_nan(const Problem& p, const Pass<W>& pass, int64_t begin, int64_t end, Lanes<A, W>* values) {
  A room[kTile];
  for (int64_t tile = begin; tile < end; tile += kTile) {
    const int64_t tile_end = end - tile < kTile ? end : tile + kTile;
    const A* factors = factors_of(p, tile, tile_end - tile, room);
    walk<W, NV, 1>(p, pass, tile, tile_end, 0, factors,
                   [&](int v, Lanes<A, W> m, int64_t, auto) { values[v] = m != m ? m : values[v]; });
  }
}

// Whether something is gathered from so far that it is worth foreseeing.
inline bool has_far(const Problem& p) {
  return p.is_far || ((WEIGHTING == kPerHead || WEIGHTING == kPerChannel) && p.edge_ids);
}

template <int W, int NV>
void sum_rows(const Problem& p, const Pass<W>& pass, int64_t first_row, int64_t end_row) {
  typedef Lanes<A, W> Values;
  const int64_t* offset = pass.vectors.offset;
  const int64_t prefetch_end = has_far(p) ? p.indptr[end_row] - kPrefetchAhead : 0;
  A room[kTile];
  const auto add = [&](int64_t begin, int64_t end, Values* sum) {
    const A* factors = WEIGHTING == kNone ? room : factors_of(p, begin, end - begin, room);
    for (int64_t entry = begin; entry < end; ++entry) {
      if (entry < prefetch_end) prefetch<W, NV>(p, pass, entry + kPrefetchAhead);
      const S* x = p.x + int64_t(p.indices[entry]) * p.x_stride;
      const EdgeWeights<W> weights(p, pass, entry, factors + (entry - begin));
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) sum[v] += message<W>(p, pass, x, weights, v);
    }
  };
  for (int64_t row = first_row; row < end_row; ++row) {
    const int64_t begin = p.indptr[row], end = p.indptr[row + 1];
    Values sum[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) sum[v] = splat<A, W>(A(0));
    if (end - begin <= kTile) {
      add(begin, end, sum);
    } else {  // sums of tiles are added up: a long row rounds as a sum of short ones
      for (int64_t tile = begin; tile < end; tile += kTile) {
        Values part[NV];
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) part[v] = splat<A, W>(A(0));
        add(tile, end - tile < kTile ? end : tile + kTile, part);
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) sum[v] += part[v];
      }
    }
    if (!p.epilogue.is_scale) {
      finish<W>(p, pass.vectors, sum, row, begin == end);
    } else {
      const A scale = p.epilogue.row_scale ? value(p.epilogue.row_scale + row) : A(1);
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) store<W>(p.y + row * p.num_features + offset[v], sum[v] * scale);
    }
  }
}

template <int W, int NV>
void extremum_rows(const Problem& p, const Pass<W>& pass, int64_t first_row, int64_t end_row) {
  constexpr int kNumChains = NV <= 2 && !PLACES ? 2 : 1;
  A room[kTile];
  const int64_t prefetch_end = has_far(p) ? p.indptr[end_row] - kPrefetchAhead : 0;
  for (int64_t row = first_row; row < end_row; ++row) {
    const int64_t begin = p.indptr[row], end = p.indptr[row + 1];
    Row<W, NV> chains[kNumChains];
    for (int chain = 0; chain < kNumChains; ++chain) chains[chain].begin();
    for (int64_t tile = begin, tile_end; tile < end; tile = tile_end) {
      tile_end = end - tile < kTile ? end : tile + kTile;
      const A* factors = factors_of(p, tile, WEIGHTING == kNone ? 0 : tile_end - tile, room);
      walk<W, NV, kNumChains>(p, pass, tile, tile_end, prefetch_end, factors, [&](int v, Lanes<A, W> m, int64_t entry, auto chain) {
        chains[decltype(chain)::value].take(v, m, Signed<A>(entry - begin));
      });
    }
    Row<W, NV>& state = chains[0];
    if constexpr (kNumChains == 2) state.join(chains[1]);
    if (state.may_hold_nan()) take_nan<W, NV>(p, pass, begin, end, state.values);
    S* y = p.y + row * p.num_features;
    if (begin == end || !p.epilogue.is_identity) {
      finish<W>(p, pass.vectors, state.values, row, begin == end);
    } else {
#pragma GCC unroll 16
      for (int v = 0; v < NV; ++v) store<W>(y + pass.vectors.offset[v], state.values[v]);
    }
    if constexpr (PLACES) {
      for (int v = 0; v < NV; ++v)
        store_places<W>(p.places + row * p.num_features + pass.vectors.offset[v], state.places[v], begin, begin == end);
    }
  }
}

template <int W, int NV>
void rows_of_length(const Problem& p, const Pass<W>& pass, int64_t first_row, int64_t end_row) {
  if constexpr (NV > 1) {
    if (pass.vectors.count < NV) return rows_of_length<W, NV - 1>(p, pass, first_row, end_row);
  }
  if constexpr (REDUCE == 0)
    sum_rows<W, NV>(p, pass, first_row, end_row);
  else
    extremum_rows<W, NV>(p, pass, first_row, end_row);
}

// Walks every row's edges for features [first, end), which belong to heads [first_head, first_head + num_heads).
template <int W>
void run_features(const Problem& p, int64_t first, int64_t end, int64_t first_head, int64_t num_heads, int num_threads) {
  const Cut<W, kMaxLength<W>> cut(first, end);
  for_blocks(p.num_blocks, num_threads, [&](int64_t block) {
    for (int64_t at = 0; at < cut.num_vectors; at += cut.length) {
      Pass<W> pass{cut.vectors(at), {first_head, num_heads, {}}};
      if constexpr (WEIGHTING == kPerHead) pass.heads.assign(pass.vectors, p.num_features / p.num_heads);
      rows_of_length<W, kMaxLength<W>>(p, pass, p.blocks[block], p.blocks[block + 1]);
    }
  });
}

// The same for all features, heads in groups that a vector has lanes for.
template <int W>
void run_heads(const Problem& p, int64_t first, int64_t end, int num_threads) {
  const int64_t num_groups = WEIGHTING == kPerHead ? (p.num_heads + W - 1) / W : 1, channels = p.num_features / p.num_heads;
  if (num_groups == 1) return run_features<W>(p, first, end, 0, p.num_heads, num_threads);
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t head = g * p.num_heads / num_groups, end_head = (g + 1) * p.num_heads / num_groups;
    run_features<W>(p, head * channels, end_head * channels, head, end_head - head, num_threads);
  }
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
  if (packed == nullptr) return run_heads<W>(p, 0, p.num_features, num_threads);
  const S* x = p.x;
  const int64_t stride = p.x_stride;
  for (int64_t first = 0, end; first < p.num_features; first = end) {
    end = p.num_features - first < slice + W ? p.num_features : first + slice;
    p.x = x, p.x_stride = stride;
    pack(p, first, end, packed, num_threads);
    p.x = packed - first, p.x_stride = end - first;
    run_heads<W>(p, first, end, num_threads);
  }
}

}  // namespace

// Everything about a product but the arrays that change from call to call; the layout of library.SpmmCall.
struct Call {
  const int64_t* indptr;
  const I* indices;
  const I* edge_ids;
  const int64_t* blocks;
  int64_t num_blocks, num_entries, num_columns, x_stride, num_features, num_heads;
  const S* row_scale;
  const S* col_scale;
  const S* bias;
  int64_t activation;
  double slope, dropout;
  int64_t seed, slice;
  const S* addend;
  const S* addend_scale;
};

extern "C" void spmm(const Call* c, const S* x, const S* weight, S* y, I* places, S* packed, int num_threads) {
  const Problem p{c->indptr, c->indices, c->edge_ids, c->blocks, c->num_blocks, x, c->num_columns, c->x_stride, c->num_features, weight,
                  c->num_heads, c->col_scale, y, places,
                  Epilogue<S>(c->row_scale, c->bias, int(c->activation), c->slope, c->dropout, c->seed, c->addend, c->addend_scale,
                              c->num_features),
                  c->num_entries * c->num_heads,
                  c->num_columns * c->num_features * int64_t(sizeof(S)) > kCoreCacheBytes};
  with_width<kLanes<S>>(p.num_features, [&](auto width) { run<decltype(width)::value>(p, packed, c->slice, num_threads); });
}
