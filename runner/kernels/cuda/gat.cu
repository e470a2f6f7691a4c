// GAT's attention and its backward: see cpu/gat.cpp for the formulas, which need no product of features an edge and store nothing of an
// edge's size.
//
// A group of lanes owns a row and head. Its edges come in tiles of GROUP: lane k scores the tile's edge k, while features are gathered by all
// lanes, each the channels lane, lane + GROUP, … of which CHUNKS are kept in registers; wider heads are walked again for the rest. KEEPS:
// whether a backward will follow.
//
// Legend: N rows, M columns, H heads, C channels a head, D = H · C. j → i. ⁺ for the edges where key + query > 0.
#include "common.cuh"
#include "items.cuh"

struct Operands {
  const S* value;  // [M, D]
  const S* key;    // [M, H]
  const S* query;  // [N, H]
  int64 num_heads, channels;
  A slope;
  Dropout dropout;
  __device__ int64 at(int64 node, int64 head) const { return (node * num_heads + head) * channels; }
  __device__ A input(int64 j, int64 i, int64 head) const { return value_of(key, j, head) + value_of(query, i, head); }
  __device__ A leaky(A x) const { return x > A(0) ? x : x * slope; }

 private:
  __device__ A value_of(const S* of, int64 node, int64 head) const { return ::value(of[node * num_heads + head]); }
};

// Adds a tile's rows of features, times the weights of their edges, to sums of a lane's channels.
template <bool kBoth>
__device__ inline void accumulate(const Operands& o, const S* rows, int64 mine, int64 head, int64 first_channel, int count, int most, A weight,
                                  A kept, A* sum, A* positive) {
  for (int k = 0; k < most; ++k) {
    const int64 there = o.at(from_lane(mine, k), head);
    const A share = from_lane(weight, k), above = kBoth ? from_lane(kept, k) : A(0);
    if (k >= count) continue;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      const int64 c = first_channel + chunk * GROUP + lane_of_group();
      if (c >= o.channels) continue;
      const A feature = value(rows[there + c]);
      sum[chunk] += share * feature;
      if (kBoth) positive[chunk] += above * feature;
    }
  }
}

extern "C" __global__ void gat(const int64* indptr, const I* indices, const I* edge_ids, int64 num_rows, const S* value_, const S* key,
                               const S* query, int64 num_heads, int64 channels, double slope, double dropout, int64 seed, S* out, A* high,
                               A* total, A* positive, A* positive_share) {
  const Graph g{indptr, indices, edge_ids, num_rows};
  const Operands o{value_, key, query, num_heads, channels, A(slope), Dropout(dropout, seed)};
  const int lane = lane_of_group();
  for (int64 number = group_number(); number < whole_warps(num_rows * num_heads); number += num_groups()) {
    const Item item(number, num_rows, num_heads, indptr);
    for (int64 first_channel = 0; first_channel < channels; first_channel += GROUP * CHUNKS) {
      A sum[CHUNKS] = {}, above[CHUNKS] = {}, best = -infinity(), mass = A(0), positive_mass = A(0);
      for (int64 first = 0; first < item.longest; first += GROUP) {
        const int count = item.count(first), most = item.most(first);
        const bool has_edge = lane < count;
        const int64 entry = item.begin + first + lane, j = has_edge ? int64(indices[entry]) : 0;
        const A z = has_edge ? o.input(j, item.row, item.head) : A(0), score = has_edge ? o.leaky(z) : -infinity();
        const A tile_high = group_max(score), highest = tile_high > best || tile_high != tile_high ? tile_high : best;
        const A shift = highest == -infinity() ? A(0) : highest;  // scores that are all -inf weigh nothing yet
        const A shrink = !count ? A(1) : mass > A(0) ? Epilogue::exponential(best - shift) : A(0);
        A weight = has_edge ? Epilogue::exponential(score - shift) : A(0), kept = z > A(0) ? weight : A(0);
        mass = mass * shrink + group_sum(weight);
        positive_mass = positive_mass * shrink + group_sum(kept);
        best = count ? highest : best;
        if (o.dropout.is_on() && has_edge) {
          const A factor = o.dropout.factor(g.edge(entry), item.head);
          weight *= factor, kept *= factor;
        }
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) sum[chunk] *= shrink, above[chunk] *= shrink;
        accumulate<KEEPS>(o, o.value, j, item.head, first_channel, count, most, weight, kept, sum, above);
      }
      if (!item.is_real) continue;
      const A factor = item.length ? A(1) / mass : A(0);
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const int64 c = first_channel + chunk * GROUP + lane, at = o.at(item.row, item.head) + c;
        if (c >= channels) continue;
        keep(out + at, sum[chunk] * factor);
        if (KEEPS) positive[at] = above[chunk] * factor;
      }
      if (lane == 0 && first_channel == 0) {
        high[number] = item.length ? best : A(0), total[number] = mass;
        positive_share[number] = positive_mass * factor;
      }
    }
  }
}

// dot[i, h] = <dout, out>, and the query's gradient.
extern "C" __global__ void gat_backward_destinations(const S* dout, const S* out, const A* total, const A* positive,
                                                     const A* positive_share, int64 num_rows, int64 num_heads, int64 channels, double slope,
                                                     A* dot, S* dquery) {
  const int64 count = num_rows * num_heads;
  for (int64 number = group_number(); number < whole_warps(count); number += num_groups()) {
    A all = A(0), above = A(0);
    if (number < count)
      for (int64 at = number * channels + lane_of_group(); at < (number + 1) * channels; at += GROUP) {
        all += value(dout[at]) * value(out[at]);
        above += value(dout[at]) * positive[at];
      }
    all = group_sum(all), above = group_sum(above);
    if (number >= count || lane_of_group()) continue;
    dot[number] = all;
    const bool is_empty = total[number] == A(0) && positive_share[number] == A(0);  // 0, whatever dout is
    keep(dquery + number, is_empty ? A(0) : (A(1) - A(slope)) * (above - all * positive_share[number]));
  }
}

// The gradients of value and key, which a source gathers from its out-edges. ``indptr`` to ``num_rows`` are of the transposed graph.
extern "C" __global__ void gat_backward_sources(const int64* indptr, const I* indices, const I* edge_ids, int64 num_rows, const S* value_,
                                                const S* key, const S* query, int64 num_heads, int64 channels, double slope, double dropout,
                                                int64 seed, const S* dout, const A* high, const A* total, const A* dot, S* dvalue, S* dkey) {
  const Graph g{indptr, indices, edge_ids, num_rows};
  const Operands o{value_, key, query, num_heads, channels, A(slope), Dropout(dropout, seed)};
  const int lane = lane_of_group();
  for (int64 number = group_number(); number < whole_warps(num_rows * num_heads); number += num_groups()) {
    const Item item(number, num_rows, num_heads, indptr);
    const int64 own = o.at(item.row, item.head);
    A product = A(0), positive_product = A(0), share = A(0), positive_share = A(0);  // <value, sum of a m dout>; sum of a S
    for (int64 first_channel = 0; first_channel < channels; first_channel += GROUP * CHUNKS) {
      A sum[CHUNKS] = {}, above[CHUNKS] = {};
      for (int64 first = 0; first < item.longest; first += GROUP) {
        const int count = item.count(first), most = item.most(first);
        const int64 entry = item.begin + first + lane, i = lane < count ? int64(indices[entry]) : 0;
        A weight = A(0), kept = A(0);
        if (lane < count) {
          const int64 stat = i * num_heads + item.head;
          const A z = o.input(item.row, i, item.head);
          weight = Epilogue::exponential(o.leaky(z) - high[stat]) / total[stat];
          kept = z > A(0) ? weight : A(0);
          if (first_channel == 0) share += weight * dot[stat], positive_share += kept * dot[stat];
          if (o.dropout.is_on()) {
            const A factor = o.dropout.factor(g.edge(entry), item.head);
            weight *= factor, kept *= factor;
          }
        }
        accumulate<true>(o, dout, i, item.head, first_channel, count, most, weight, kept, sum, above);
      }
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const int64 c = first_channel + chunk * GROUP + lane;
        if (!item.is_real || c >= channels) continue;
        keep(dvalue + own + c, sum[chunk]);
        product += value(o.value[own + c]) * sum[chunk], positive_product += value(o.value[own + c]) * above[chunk];
      }
    }
    const A all = group_sum(product) - group_sum(share), above = group_sum(positive_product) - group_sum(positive_share);
    if (item.is_real && lane == 0) keep(dkey + number, item.length ? o.slope * all + (A(1) - o.slope) * above : A(0));
  }
}
