// GAT's attention: out[i] = sum over j → i of softmax(LeakyReLU(key[j, h] + query[i, h])) · dropout · value[j], and its backward.
//
// A score is made of one number of each end, so no gradient needs a product of features an edge. With a = softmax, m = dropout, s = slope,
// S_i = <dout_i, out_i>, and ⁺ for the edges where key + query > 0, the gradients are
//   dvalue_j = sum over i of a m dout_i
//   dkey_j   = s (<value_j, dvalue_j> - sum of a S_i) + (1 - s) (<value_j, sum⁺ of a m dout_i> - sum⁺ of a S_i)
//   dquery_i = (1 - s) (<dout_i, sum⁺ of a m value_j> - S_i sum⁺ of a)        (over all edges, those two cancel)
// The forward keeps sum⁺ of a m value [N, D] and sum⁺ of a [N, H]; the backward walks the transposed graph once. Nothing has an edge's size.
//
// The edges of some rows are taken together: what their scores need is fetched into tiles, which whole vectors then walk; the weights replace
// it there, and are spread over the lanes of their heads while rows of features are gathered. More heads than lanes are taken in groups.
//
// Legend: N rows, M columns, E edges, H heads, P heads a tile's row has room for, C channels a head, D = H · C.
#include "spans.h"

namespace {

constexpr A kLowest = -std::numeric_limits<A>::infinity();

struct Operands {
  const S* value;  // [M, D]
  const S* key;    // [M, H]
  const S* query;  // [N, H]
  int64_t num_heads, channels;
  A slope;
  Dropout dropout;
  int64_t width() const { return num_heads * channels; }
};

// What the forward leaves.
struct Result {
  S* out;             // [N, D]
  A* high;            // [N, H], largest score
  A* total;           // [N, H], sum of exponentials
  A* positive;        // [N, D], sum⁺ of a m value; null without a backward
  A* positive_share;  // [N, H], sum⁺ of a
};

template <int W>
void store_group(A* to, const A* lanes, const Group<A, W>& g) {
  for (int64_t h = 0; h < g.num_heads; ++h) to[g.first_head + h] = lanes[h];
}

template <int W, int P, bool kBoth>
struct Forward {
  const Graph<I>& graph;
  const Operands& o;
  const Group<A, W>& g;
  const Result& result;
  PerHead<P> key, query;
  Gatherer<W> gatherer;

  struct Room {
    std::vector<A> all, kept, sum, positive, long_sum, long_positive;
    Weights weights;
    explicit Room(int64_t width)
        : all(kTileLanes + 2 * kWide), kept(all.size()), sum(width), positive(width), long_sum(width), long_positive(width),
          weights{all.data(), kept.data()} {}
  };
  struct Mass {
    Wide all, positive;
  };

  void rows(int64_t begin, int64_t end) const {
    Room room(g.width);
    for_batches<P>(
        graph, begin, end,
        [&](const Span* spans, int64_t count) {
          for (int64_t s = 0; s < count; ++s) fetch(spans[s], room.weights.all);
          Mass mass[kTileLanes / kWide];
          for (int64_t s = 0; s < count; ++s) {
            const Wide best = highest(spans[s], room.weights.all, splat<A, kWide>(kLowest));
            mass[s] = exponentiate(spans[s], best, room.weights);
            if (spans[s].count) keep_high(spans[s].row, best);
          }
          for (int64_t s = 0; s < count; ++s) {
            if (o.dropout.is_on()) drop<P>(graph, o.dropout, g.first_head, spans[s], room.weights);
            gatherer.template accumulate<kBoth>(spans[s], room.weights, room.sum.data(), room.positive.data());
            finish(spans[s].row, spans[s].count == 0, mass[s], room.sum.data(), room.positive.data());
          }
        },
        [&](int64_t row) { long_row(row, room); });
  }

 private:
  void long_row(int64_t row, Room& room) const {
    const Weights& weights = room.weights;
    Wide best = splat<A, kWide>(kLowest);
    for_pieces<P>(graph, row, [&](const Span& piece) {
      fetch(piece, weights.all);
      best = highest(piece, weights.all, best);
    });
    Mass mass{Wide{}, Wide{}};
    std::fill(room.long_sum.begin(), room.long_sum.end(), A(0));
    std::fill(room.long_positive.begin(), room.long_positive.end(), A(0));
    for_pieces<P>(graph, row, [&](const Span& piece) {
      fetch(piece, weights.all);
      const Mass more = exponentiate(piece, best, weights);
      mass.all += more.all, mass.positive += more.positive;
      if (o.dropout.is_on()) drop<P>(graph, o.dropout, g.first_head, piece, weights);
      gatherer.template accumulate<kBoth>(piece, weights, room.sum.data(), room.positive.data());
      for (int64_t d = 0; d < g.width; ++d) room.long_sum[d] += room.sum[d], room.long_positive[d] += room.positive[d];
    });
    keep_high(row, best);
    finish(row, false, mass, room.long_sum.data(), room.long_positive.data());
  }

  // The tile's rows become key + query.
  void fetch(const Span& span, A* tile) const {
    const I* indices = graph.indices + span.begin;
    const Lanes<A, P> own = load<P>(query.data + span.row * P);
    for (int64_t k = 0; k < span.count; ++k) store<P>(tile + span.lane + k * P, load<P>(key.data + int64_t(indices[k]) * P) + own);
  }
  Wide highest(const Span& span, const A* tile, Wide best) const {
    for_tile<P>(span, [&](int64_t at, auto only_edges) {
      best = maximum<A, kWide>(only_edges(leaky<A, kWide>(load<kWide>(tile + at), o.slope), splat<A, kWide>(kLowest)), best);
    });
    return fold<A, kWide>(best, P, kWide, maximum<A, kWide>);
  }
  // The tile of key + query becomes weights, e^(score - best). A NaN is found here: best may have lost it.
  Mass exponentiate(const Span& span, Wide best, const Weights& weights) const {
    const Wide zero = splat<A, kWide>(A(0)), shift = best == kLowest ? zero : best;  // scores that are all -inf weigh nothing
    Mass mass{zero, zero};
    for_tile<P>(span, [&](int64_t at, auto only_edges) {
      const Wide z = load<kWide>(weights.all + at);
      const Wide weight = only_edges(exponential_up_to_88<kWide>(leaky<A, kWide>(z, o.slope) - shift), zero);
      const Wide kept = z > zero ? weight : zero;
      mass.all += weight, mass.positive += kept;
      store<kWide>(weights.all + at, weight);
      if constexpr (kBoth) store<kWide>(weights.positive + at, kept);
    });
    return Mass{total_of<P>(mass.all), total_of<P>(mass.positive)};
  }
  void keep_high(int64_t row, Wide best) const {
    A lanes[kWide];
    store<kWide>(lanes, best);
    store_group(result.high + row * o.num_heads, lanes, g);
  }
  void finish(int64_t row, bool is_empty, const Mass& mass, const A* sum, const A* positive) const {
    const int64_t at = row * o.width() + g.column;
    A lanes[kWide];
    store<kWide>(lanes, mass.all);
    store_group(result.total + row * o.num_heads, lanes, g);
    if (is_empty) store_group(result.high + row * o.num_heads, lanes, g);
    const Wide factor = is_empty ? Wide{} : splat<A, kWide>(A(1)) / mass.all;
    store<kWide>(lanes, factor);
    const Lanes<A, W> factors = load<W>(lanes);
    for (int64_t v = 0; v < g.num_vectors(); ++v) {
      const Lanes<A, W> own = permute<A, W>(factors, g.head[v]);
      store<W>(result.out + at + g.offset[v], load<W>(sum + g.offset[v]) * own);
      if constexpr (kBoth) store<W>(result.positive + at + g.offset[v], load<W>(positive + g.offset[v]) * own);
    }
    store<kWide>(lanes, mass.positive * factor);
    store_group(result.positive_share + row * o.num_heads, lanes, g);
  }
};

// What the backward reads of a destination, side by side: query, largest score, 1 / sum of exponentials, S. P of each.
enum { kQuery, kHigh, kInverse, kDot, kNumStats };

// Fills them, [N, kNumStats, P], and the query's gradient.
template <int W, int P>
void fill_stats(const Operands& o, const Group<A, W>& g, const Result& saved, const S* dout, int64_t num_rows, A* stats, S* dquery,
                int num_threads) {
  constexpr int64_t kRows = 256;
  const int64_t H = o.num_heads;
  for_blocks((num_rows + kRows - 1) / kRows, num_threads, [&](int64_t block) {
    for (int64_t i = block * kRows; i < (block + 1) * kRows && i < num_rows; ++i) {
      const int64_t at = i * o.width() + g.column;
      A dot[W], dot_positive[W];
      store<W>(dot, g.sums([&](int64_t c) { return load<W>(dout + at + c) * load<W>(saved.out + at + c); }));
      store<W>(dot_positive, g.sums([&](int64_t c) { return load<W>(dout + at + c) * load<W>(saved.positive + at + c); }));
      A* to = stats + i * kNumStats * P;
      for (int64_t p = 0; p < P; ++p) {
        const int64_t h = p < g.num_heads ? p : 0, of_head = i * H + g.first_head + h;
        to[kQuery * P + p] = value(o.query + of_head);
        to[kHigh * P + p] = saved.high[of_head];
        to[kInverse * P + p] = A(1) / saved.total[of_head];
        to[kDot * P + p] = dot[h];
        const bool is_empty = saved.total[of_head] == A(0) && saved.positive_share[of_head] == A(0);  // 0, whatever dout is
        if (p == h)
          store<1>(dquery + of_head,
                   is_empty ? A(0) : (A(1) - o.slope) * (dot_positive[h] - dot[h] * saved.positive_share[of_head]));
      }
    }
  });
}

template <int W, int P>
struct Backward {
  const Graph<I>& turned;
  const Operands& o;
  const Group<A, W>& g;
  const A* stats;
  PerHead<P> key;
  Gatherer<W> gatherer;  // of dout
  S* dvalue;
  S* dkey;

  struct Room {
    std::vector<A> tiles[kNumStats], sum, positive, long_sum, long_positive;
    Weights weights;  // in the first tiles
    explicit Room(int64_t width) : sum(width), positive(width), long_sum(width), long_positive(width) {
      for (std::vector<A>& tile : tiles) tile.resize(kTileLanes + 2 * kWide);
      weights = {tiles[kQuery].data(), tiles[kHigh].data()};
    }
  };
  struct Share {  // sum of a S, over all edges and those where key + query > 0
    Wide all, positive;
  };

  void rows(int64_t begin, int64_t end) const {
    Room room(g.width);
    const Weights& weights = room.weights;
    for_batches<P>(
        turned, begin, end,
        [&](const Span* spans, int64_t count) {
          for (int64_t s = 0; s < count; ++s) fetch(spans[s], room);
          Share share[kTileLanes / kWide];
          for (int64_t s = 0; s < count; ++s) share[s] = weigh(spans[s], room);
          for (int64_t s = 0; s < count; ++s) {
            if (o.dropout.is_on()) drop<P>(turned, o.dropout, g.first_head, spans[s], weights);
            gatherer.template accumulate<true>(spans[s], weights, room.sum.data(), room.positive.data());
            finish(spans[s].row, spans[s].count == 0, share[s], room.sum.data(), room.positive.data());
          }
        },
        [&](int64_t row) { long_row(row, room); });
  }

 private:
  void long_row(int64_t row, Room& room) const {
    const Weights& weights = room.weights;
    Share share{Wide{}, Wide{}};
    std::fill(room.long_sum.begin(), room.long_sum.end(), A(0));
    std::fill(room.long_positive.begin(), room.long_positive.end(), A(0));
    for_pieces<P>(turned, row, [&](const Span& piece) {
      fetch(piece, room);
      const Share more = weigh(piece, room);
      share.all += more.all, share.positive += more.positive;
      if (o.dropout.is_on()) drop<P>(turned, o.dropout, g.first_head, piece, weights);
      gatherer.template accumulate<true>(piece, weights, room.sum.data(), room.positive.data());
      for (int64_t d = 0; d < g.width; ++d) room.long_sum[d] += room.sum[d], room.long_positive[d] += room.positive[d];
    });
    finish(row, false, share, room.long_sum.data(), room.long_positive.data());
  }

  void fetch(const Span& span, Room& room) const {
    const I* indices = turned.indices + span.begin;
    const int64_t num_foreseen = turned.num_entries - span.begin - kPrefetchAhead;
    for (int64_t k = 0; k < span.count; ++k) {
      if (k < num_foreseen) {
        const A* later = stats + int64_t(indices[k + kPrefetchAhead]) * kNumStats * P;
        for (int64_t at = 0; at < kNumStats * P; at += 64 / int(sizeof(A))) __builtin_prefetch(later + at);
      }
      const A* from = stats + int64_t(indices[k]) * kNumStats * P;
      for (int which = 0; which < kNumStats; ++which)
        store<P>(room.tiles[which].data() + span.lane + k * P, load<P>(from + which * P));
    }
  }
  // The first tiles become the weights a.
  Share weigh(const Span& span, Room& room) const {
    const Wide zero = splat<A, kWide>(A(0)), own = key.repeated(span.row);
    Share share{zero, zero};
    for_tile<P>(span, [&](int64_t at, auto only_edges) {
      const auto stat = [&](int which) { return load<kWide>(room.tiles[which].data() + at); };
      const Wide z = own + stat(kQuery);
      const Wide weight = exponential_up_to_88<kWide>(leaky<A, kWide>(z, o.slope) - stat(kHigh)) * stat(kInverse);
      const Wide part = only_edges(weight * stat(kDot), zero);
      share.all += part, share.positive += z > zero ? part : zero;
      store<kWide>(room.weights.all + at, weight);
      store<kWide>(room.weights.positive + at, z > zero ? weight : zero);
    });
    return Share{total_of<P>(share.all), total_of<P>(share.positive)};
  }
  void finish(int64_t row, bool is_empty, const Share& share, const A* sum, const A* positive) const {
    const S* own = o.value + row * o.width() + g.column;
    const auto dot = [&](const A* with) { return g.sums([&](int64_t c) { return load<W>(own + c) * load<W>(with + c); }); };
    A all[kWide], above[kWide], dots[W], dots_above[W];
    store<kWide>(all, share.all), store<kWide>(above, share.positive);
    store<W>(dots, dot(sum)), store<W>(dots_above, dot(positive));
    for (int64_t h = 0; h < g.num_heads; ++h)
      store<1>(dkey + row * o.num_heads + g.first_head + h,  // without edges 0, whatever value is
               is_empty ? A(0) : o.slope * (dots[h] - all[h]) + (A(1) - o.slope) * (dots_above[h] - above[h]));
    for_vectors<W>(g.width, [&](int64_t c) { store<W>(dvalue + row * o.width() + g.column + c, load<W>(sum + c)); });
  }
};

// Calls f(P) for the least power of two P of at least num_heads, at most W.
template <int W, int P = 1, class F>
void with_pitch(int64_t num_heads, F f) {
  if constexpr (P < W) {
    if (num_heads > P) return with_pitch<W, 2 * P>(num_heads, f);
  }
  f(std::integral_constant<int, P>{});
}

template <bool kBoth>
void forward(const Graph<I>& graph, const Operands& o, const Result& result, int num_threads) {
  for_groups<A, kWide>(o.num_heads, o.channels, [&](auto g) {
    constexpr int W = decltype(g)::kWidth;
    with_pitch<W>(g.num_heads, [&](auto pitch) {
      constexpr int P = decltype(pitch)::value;
      const Forward<W, P, kBoth> work{graph, o, g, result, PerHead<P>(o.key, graph.num_columns, o.num_heads, g, num_threads),
                                      PerHead<P>(o.query, graph.num_rows, o.num_heads, g, num_threads),
                                      Gatherer<W>{graph, g, o.value + g.column, o.width(), P}};
      for_blocks(graph.num_blocks, num_threads, [&](int64_t block) { work.rows(graph.blocks[block], graph.blocks[block + 1]); });
    });
  });
}

}  // namespace

extern "C" void gat(const int64_t* indptr, const I* indices, const I* edge_ids, const int64_t* blocks, int64_t num_blocks, int64_t num_rows,
                    int64_t num_columns, int64_t num_entries, const S* value, const S* key, const S* query, int64_t num_heads,
                    int64_t channels, double slope, double dropout, int64_t seed, S* out, A* high, A* total, A* positive,
                    A* positive_share, int num_threads) {
  const Graph<I> graph{indptr, indices, edge_ids, blocks, num_blocks, num_rows, num_columns, num_entries};
  const Operands o{value, key, query, num_heads, channels, A(slope), Dropout(dropout, seed)};
  const Result result{out, high, total, positive, positive_share};
  positive ? forward<true>(graph, o, result, num_threads) : forward<false>(graph, o, result, num_threads);
}

// ``indptr`` to ``num_blocks`` are of the transposed graph; num_rows and num_columns of the graph.
extern "C" void gat_backward(const int64_t* indptr, const I* indices, const I* edge_ids, const int64_t* blocks, int64_t num_blocks,
                             int64_t num_rows, int64_t num_columns, int64_t num_entries, const S* value, const S* key, const S* query,
                             int64_t num_heads, int64_t channels, double slope, double dropout, int64_t seed, S* out, A* high, A* total,
                             A* positive, A* positive_share, const S* dout, S* dvalue, S* dkey, S* dquery, int num_threads) {
  const Graph<I> turned{indptr, indices, edge_ids, blocks, num_blocks, num_columns, num_rows, num_entries};
  const Operands o{value, key, query, num_heads, channels, A(slope), Dropout(dropout, seed)};
  const Result saved{out, high, total, positive, positive_share};
  for_groups<A, kWide>(num_heads, channels, [&](auto g) {
    constexpr int W = decltype(g)::kWidth;
    with_pitch<W>(g.num_heads, [&](auto pitch) {
      constexpr int P = decltype(pitch)::value;
      const std::unique_ptr<A[]> stats(new A[num_rows * kNumStats * P]);
      fill_stats<W, P>(o, g, saved, dout, num_rows, stats.get(), dquery, num_threads);
      const Backward<W, P> work{turned, o, g, stats.get(), PerHead<P>(key, num_columns, num_heads, g, num_threads),
                                Gatherer<W>{turned, g, dout + g.column, o.width(), P}, dvalue, dkey};
      for_blocks(num_blocks, num_threads, [&](int64_t block) { work.rows(blocks[block], blocks[block + 1]); });
    });
  });
}
