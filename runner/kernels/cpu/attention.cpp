// Attention over a destination's edges in one pass, and its backward by recomputation; nothing of size E × H × C is stored.
//
// SCORE 0 GAT: LeakyReLU(key[j, h] + query[i, h]); 1 GATv2: <vector[h], LeakyReLU(value[j, h] + query[i, h])>;
// 2 dot: scale · <key[j, h], query[i, h]>. out[i] = sum of softmax(score) · dropout · value[j]. A destination keeps the largest score and
// the sum of exponentials of each head (rescaled when a later tile has a larger one), which is all that the backward needs to recompute.
//
// Legend: N rows, M columns, E edges, H heads, C channels a head, D = H · C. j → i.
#include "heads.h"
#include "lanes.h"
#include "parallel.h"
#include "random.h"
#include "vectors.h"

typedef STORAGE S;
typedef INDEX I;
typedef Compute<S> A;

namespace {

enum { kGat, kGatV2, kDotProduct };
constexpr int64_t kTile = 128;  // edges whose scores are held at once

struct Graph {
  const int64_t* indptr;
  const I* indices;
  const I* edge_ids;
  const int64_t* blocks;
  int64_t num_blocks;
  int64_t edge(int64_t entry) const { return edge_ids ? int64_t(edge_ids[entry]) : entry; }
};

struct Operands {
  const S* value;   // [M, D]
  const S* key;     // [M, H] for GAT, [M, D] for dot
  const S* query;   // [N, H] for GAT, [N, D] else
  const S* vector;  // [D], GATv2
  int64_t num_heads, channels;
  A slope, scale;
  Dropout dropout;
  int64_t width() const { return num_heads * channels; }
  A leaky(A x) const { return x > A(0) ? x : x * slope; }
};

// <vector, LeakyReLU(x + y)> over n channels.
template <int W>
inline A leaky_dot(const S* vector, const S* x, const S* y, int64_t n, A slope) {
  Lanes<A, W> sum = splat<A, W>(A(0));
  int64_t at = 0;
  for (; at + W <= n; at += W) {
    const Lanes<A, W> z = load<W>(x + at) + load<W>(y + at);
    sum += load<W>(vector + at) * (z > splat<A, W>(A(0)) ? z : z * slope);
  }
  A total = sum_of<A, W>(sum);
  if constexpr (W > 1) {
    if (at < n) total += leaky_dot<W / 2>(vector + at, x + at, y + at, n - at, slope);
  }
  return total;
}

// Scores of edge j → i for every head.
template <int W>
inline void scores(const Operands& o, int64_t j, int64_t i, A* to) {
  for (int64_t h = 0; h < o.num_heads; ++h) {
    if constexpr (SCORE == kGat) {
      to[h] = o.leaky(value(o.key + j * o.num_heads + h) + value(o.query + i * o.num_heads + h));
    } else {
      const int64_t at = h * o.channels;
      if constexpr (SCORE == kGatV2)
        to[h] = leaky_dot<W>(o.vector + at, o.value + j * o.width() + at, o.query + i * o.width() + at, o.channels, o.slope);
      else
        to[h] = o.scale * dot<W>(o.key + j * o.width() + at, o.query + i * o.width() + at, o.channels);
    }
  }
}

// sum[D] += weights[k, h] · x[indices[k], h, :] over n edges, a few vectors at a time in registers.
template <int W, int NV>
inline void accumulate_pass(const S* x, int64_t width, const I* indices, int64_t n, const A* weights, int64_t pitch,
                            const Vectors& vectors, const A* start, A* sum) {
  Lanes<A, W> held[NV];
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) held[v] = load<W>(start + vectors.offset[v]);
  for (int64_t k = 0; k < n; ++k) {
    const S* from = x + int64_t(indices[k]) * width;
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) held[v] += load<W>(from + vectors.offset[v]) * weights[k * pitch + vectors.head[v]];
  }
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) store<W>(sum + vectors.offset[v], held[v]);
}
template <int W, int NV = kMaxVectors>
void accumulate_vectors(const S* x, int64_t width, const I* indices, int64_t n, const A* weights, int64_t pitch,
                        const Vectors& vectors, const A* start, A* sum) {
  if constexpr (NV > 1) {
    if (vectors.count < NV) return accumulate_vectors<W, NV - 1>(x, width, indices, n, weights, pitch, vectors, start, sum);
  }
  accumulate_pass<W, NV>(x, width, indices, n, weights, pitch, vectors, start, sum);
}
template <int W>
void accumulate(const Cut<W>& cut, const S* x, int64_t width, const I* indices, int64_t n, const A* weights, int64_t pitch, A* sum,
                A* scratch) {
  const A* start = sum;
  if (cut.channels % W && cut.num_vectors > cut.length) {  // a lane that two passes visit must begin at the same value in both
    memcpy(scratch, sum, width * sizeof(A));
    start = scratch;
  }
  for (int64_t at = 0; at < cut.num_vectors; at += cut.length)
    accumulate_vectors<W>(x, width, indices, n, weights, pitch, cut.vectors(at), start, sum);
}

// Multiplies the weights of edge ``edge`` by their dropout factors.
inline void drop(const Operands& o, int64_t edge, A* weights) {
  if (!o.dropout.is_on()) return;
  const uint32_t key = o.dropout.row_key(edge);
  for (int64_t h = 0; h < o.num_heads; ++h) weights[h] *= o.dropout.keeps(key, h) ? A(o.dropout.scale) : A(0);
}

template <int W>
void forward(const Graph& g, const Operands& o, S* out, A* high, A* total, int num_threads) {
  const int64_t H = o.num_heads, D = o.width();
  const Cut<W> cut(0, D, H);
  for_blocks(g.num_blocks, num_threads, [&](int64_t block) {
    HeadRows<A> tile(H);
    std::vector<A> sum(D), scratch(D), best(H), mass(H);
    for (int64_t i = g.blocks[block]; i < g.blocks[block + 1]; ++i) {
      for (int64_t d = 0; d < D; ++d) sum[d] = 0;
      for (int64_t h = 0; h < H; ++h) best[h] = -std::numeric_limits<A>::infinity(), mass[h] = 0;
      for (int64_t first = g.indptr[i]; first < g.indptr[i + 1]; first += kTile) {
        const int64_t count = g.indptr[i + 1] - first < kTile ? g.indptr[i + 1] - first : kTile;
        tile.resize(count, -std::numeric_limits<A>::infinity());
        for (int64_t k = 0; k < count; ++k) scores<W>(o, g.indices[first + k], i, tile.row(k));
        tile.find_high();
        for (int64_t h = 0; h < H; ++h) {
          const A highest = tile.high[h] > best[h] || tile.high[h] != tile.high[h] ? tile.high[h] : best[h];
          const A shrink = mass[h] > A(0) ? std::exp(best[h] - highest) : A(0);
          if (first != g.indptr[i] && highest != best[h])
            for (int64_t c = 0; c < o.channels; ++c) sum[h * o.channels + c] *= shrink;
          mass[h] *= shrink;
          tile.high[h] = best[h] = highest;
        }
        tile.spread(tile.high.data());
        tile.exponentiate();
        for (int64_t h = 0; h < H; ++h) mass[h] += tile.total[h];
        for (int64_t k = 0; k < count; ++k) drop(o, g.edge(first + k), tile.row(k));
        accumulate<W>(cut, o.value, D, g.indices + first, count, tile.buffer.data(), tile.pitch, sum.data(), scratch.data());
      }
      for (int64_t h = 0; h < H; ++h) {
        const A inverse = mass[h] == A(0) ? A(0) : A(1) / mass[h];
        for (int64_t c = h * o.channels; c < (h + 1) * o.channels; ++c) store<1>(out + i * D + c, sum[c] * inverse);
        high[i * H + h] = mass[h] == A(0) ? A(0) : best[h], total[i * H + h] = mass[h];
      }
    }
  });
}

// What the backward reads beside the operands.
struct Saved {
  const S* out;
  const S* dout;
  const A* high;
  const A* total;
  A* dot;     // [N, H]: <dout, out>
  S* dscore;  // [E, H], by edge id: gradient of what GAT's LeakyReLU takes, of the score for the others
};

template <int W>
void dots(const Operands& o, const Saved& s, int64_t num_rows, int num_threads) {
  constexpr int64_t kRows = 512;
  for_blocks((num_rows + kRows - 1) / kRows, num_threads, [&](int64_t block) {
    for (int64_t i = block * kRows; i < (block + 1) * kRows && i < num_rows; ++i)
      for (int64_t h = 0; h < o.num_heads; ++h) {
        const int64_t at = i * o.width() + h * o.channels;
        s.dot[i * o.num_heads + h] = dot<W>(s.dout + at, s.out + at, o.channels);
      }
  });
}

// to[c] += dscore · vector · LeakyReLU'(x + y), and sum[c] += dscore · LeakyReLU(x + y) where given, for n channels of GATv2.
template <int W>
inline void leaky_grad(const S* vector, const S* x, const S* y, int64_t n, A slope, A dscore, A* to, A* sum) {
  int64_t at = 0;
  for (; at + W <= n; at += W) {
    const Lanes<A, W> z = load<W>(x + at) + load<W>(y + at), one = splat<A, W>(A(1));
    const Lanes<A, W> steepness = z > splat<A, W>(A(0)) ? one : one * slope;
    store<W>(to + at, load<W>(to + at) + load<W>(vector + at) * steepness * dscore);
    if (sum) store<W>(sum + at, load<W>(sum + at) + z * steepness * dscore);
  }
  if constexpr (W > 1) {
    if (at < n) leaky_grad<W / 2>(vector + at, x + at, y + at, n - at, slope, dscore, to + at, sum ? sum + at : sum);
  }
}

// The gradients that a source gathers from its out-edges: of value, and of key (GAT, dot). Walks the transposed graph.
template <int W>
void backward_sources(const Graph& turned, const Operands& o, const Saved& s, S* dvalue, S* dkey, int num_threads) {
  const int64_t H = o.num_heads, C = o.channels, D = o.width();
  const Cut<W> cut(0, D, H);
  for_blocks(turned.num_blocks, num_threads, [&](int64_t block) {
    HeadRows<A> weights(H), grads(H);
    std::vector<A> sum(D), key_sum(SCORE == kGat ? H : D), scratch(D);
    for (int64_t j = turned.blocks[block]; j < turned.blocks[block + 1]; ++j) {
      for (A& entry : sum) entry = 0;
      for (A& entry : key_sum) entry = 0;
      for (int64_t first = turned.indptr[j]; first < turned.indptr[j + 1]; first += kTile) {
        const int64_t count = turned.indptr[j + 1] - first < kTile ? turned.indptr[j + 1] - first : kTile;
        weights.resize(count, -std::numeric_limits<A>::infinity());
        grads.resize(count, A(0));
        for (int64_t k = 0; k < count; ++k) {  // scores, less the destination's largest
          const int64_t i = turned.indices[first + k];
          scores<W>(o, j, i, weights.row(k));
          for (int64_t h = 0; h < H; ++h) weights.row(k)[h] -= s.high[i * H + h];
        }
        for (A& entry : weights.high) entry = 0;
        weights.exponentiate();
        for (int64_t k = 0; k < count; ++k) {
          const int64_t i = turned.indices[first + k], edge = turned.edge(first + k);
          A* weight = weights.row(k);
          A* grad = grads.row(k);
          for (int64_t h = 0; h < H; ++h) {
            weight[h] /= s.total[i * H + h];
            grad[h] = dot<W>(s.dout + i * D + h * C, o.value + j * D + h * C, C);
          }
          drop(o, edge, grad);
          for (int64_t h = 0; h < H; ++h) {
            grad[h] = weight[h] * (grad[h] - s.dot[i * H + h]);
            if constexpr (SCORE == kGat) {
              if (!(value(o.key + j * H + h) + value(o.query + i * H + h) > A(0))) grad[h] *= o.slope;
              key_sum[h] += grad[h];
            }
            store<1>(s.dscore + edge * H + h, grad[h]);
            if constexpr (SCORE == kGatV2)
              leaky_grad<W>(o.vector + h * C, o.value + j * D + h * C, o.query + i * D + h * C, C, o.slope, grad[h], &sum[h * C],
                            static_cast<A*>(nullptr));
            if constexpr (SCORE == kDotProduct) grad[h] *= o.scale;
          }
          drop(o, edge, weight);
        }
        const I* indices = turned.indices + first;
        accumulate<W>(cut, s.dout, D, indices, count, weights.buffer.data(), weights.pitch, sum.data(), scratch.data());
        if constexpr (SCORE == kDotProduct)
          accumulate<W>(cut, o.query, D, indices, count, grads.buffer.data(), grads.pitch, key_sum.data(), scratch.data());
      }
      for (int64_t d = 0; d < D; ++d) store<1>(dvalue + j * D + d, sum[d]);
      if constexpr (SCORE != kGatV2)
        for (size_t d = 0; d < key_sum.size(); ++d) store<1>(dkey + j * int64_t(key_sum.size()) + int64_t(d), key_sum[d]);
    }
  });
}

// GATv2's gradients of query and vector, from dscore; the vector's in num_parts partial sums of neighbouring rows, so that their order
// doesn't depend on the threads.
template <int W>
void backward_destinations(const Graph& g, const Operands& o, const S* dscore, S* dquery, A* dvector_parts, int64_t num_parts,
                           int num_threads) {
  const int64_t H = o.num_heads, C = o.channels, D = o.width();
  for_blocks(num_parts, num_threads, [&](int64_t part) {
    std::vector<A> sum(D);
    A* vector_sum = dvector_parts + part * D;
    const int64_t first = g.blocks[part * g.num_blocks / num_parts], end = g.blocks[(part + 1) * g.num_blocks / num_parts];
    for (int64_t i = first; i < end; ++i) {
      for (A& entry : sum) entry = 0;
      for (int64_t k = g.indptr[i]; k < g.indptr[i + 1]; ++k) {
        const S* there = o.value + int64_t(g.indices[k]) * D;
        for (int64_t h = 0; h < H; ++h)
          leaky_grad<W>(o.vector + h * C, there + h * C, o.query + i * D + h * C, C, o.slope, value(dscore + g.edge(k) * H + h),
                        &sum[h * C], vector_sum + h * C);
      }
      for (int64_t d = 0; d < D; ++d) store<1>(dquery + i * D + d, sum[d]);
    }
  });
}

}  // namespace

extern "C" void attention(const int64_t* indptr, const I* indices, const I* edge_ids, const int64_t* blocks, int64_t num_blocks,
                          const S* value, const S* key, const S* query, const S* vector, int64_t num_heads, int64_t channels,
                          double slope, double scale, double dropout, int64_t seed, S* out, A* high, A* total, int num_threads) {
  const Graph g{indptr, indices, edge_ids, blocks, num_blocks};
  const Operands o{value, key, query, vector, num_heads, channels, A(slope), A(scale), Dropout(dropout, seed)};
  with_width<kLanes<S>>(channels, [&](auto width) { forward<decltype(width)::value>(g, o, out, high, total, num_threads); });
}

extern "C" void attention_backward_sources(const int64_t* indptr, const I* indices, const I* edge_ids, const int64_t* blocks,
                                           int64_t num_blocks, int64_t num_rows, const S* value, const S* key, const S* query,
                                           const S* vector, int64_t num_heads, int64_t channels, double slope, double scale,
                                           double dropout, int64_t seed, const S* out, const S* dout, const A* high, const A* total,
                                           A* dot, S* dscore, S* dvalue, S* dkey, int num_threads) {
  const Graph turned{indptr, indices, edge_ids, blocks, num_blocks};
  const Operands o{value, key, query, vector, num_heads, channels, A(slope), A(scale), Dropout(dropout, seed)};
  const Saved s{out, dout, high, total, dot, dscore};
  with_width<kLanes<S>>(channels, [&](auto width) {
    constexpr int W = decltype(width)::value;
    dots<W>(o, s, num_rows, num_threads);
    backward_sources<W>(turned, o, s, dvalue, dkey, num_threads);
  });
}

extern "C" void attention_backward_destinations(const int64_t* indptr, const I* indices, const I* edge_ids, const int64_t* blocks,
                                                int64_t num_blocks, const S* value, const S* query, const S* vector,
                                                int64_t num_heads, int64_t channels, double slope, const S* dscore, S* dquery,
                                                A* dvector_parts, int64_t num_parts, int num_threads) {
  const Graph g{indptr, indices, edge_ids, blocks, num_blocks};
  const Operands o{value, nullptr, query, vector, num_heads, channels, A(slope), A(1), Dropout(0, 0)};
  with_width<kLanes<S>>(channels, [&](auto width) {
    backward_destinations<decltype(width)::value>(g, o, dscore, dquery, dvector_parts, num_parts, num_threads);
  });
}
