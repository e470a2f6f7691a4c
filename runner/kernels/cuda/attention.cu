// Attention over a destination's edges in one pass, and its backward by recomputation; nothing of size E × H × C is stored.
//
// SCORE 0 GATv2: <vector[h], LeakyReLU(value[j, h] + query[i, h])>; 1 dot: scale · <key[j, h], query[i, h]>. (GAT's is in gat.cu.) A group of lanes owns a row and head. Its edges come in tiles of GROUP: lane k holds the score of
// the tile's edge k, while sums over channels use all lanes, each with the channels lane, lane + GROUP, … of which CHUNKS are kept in
// registers; wider heads are walked again for the rest.
//
// Legend: N rows, M columns, E edges, H heads, C channels a head, D = H · C. j → i.
#include "common.cuh"
#include "items.cuh"

enum { kGatV2, kDotProduct };

struct Operands {
  const S* value;
  const S* key;
  const S* query;
  const S* vector;
  int64 num_heads, channels;
  A slope, scale;
  Dropout dropout;
  __device__ A leaky(A x) const { return x > A(0) ? x : x * slope; }
  __device__ int64 at(int64 node, int64 head) const { return (node * num_heads + head) * channels; }
};

// <a, b> over a head's channels, on all lanes of the group.
__device__ inline A head_dot(const S* a, const S* b, int64 channels, bool is_edge) {
  A sum = A(0);
  if (is_edge)
    for (int64 c = lane_of_group(); c < channels; c += GROUP) sum += value(a[c]) * value(b[c]);
  return group_sum(sum);
}

// Score of edge j → i of the calling group's tile, on all lanes of the group.
__device__ inline A cooperative_score(const Operands& o, int64 j, int64 i, int64 head, bool is_edge) {
  if (SCORE == kDotProduct) return o.scale * head_dot(o.key + o.at(j, head), o.query + o.at(i, head), o.channels, is_edge);
  A sum = A(0);
  if (is_edge) {
    const S* there = o.value + o.at(j, head);
    const S* here = o.query + o.at(i, head);
    const S* vector = o.vector + head * o.channels;
    for (int64 c = lane_of_group(); c < o.channels; c += GROUP) sum += value(vector[c]) * o.leaky(value(there[c]) + value(here[c]));
  }
  return group_sum(sum);
}

// Scores of a tile: lane k's is that of edge k. ``mine`` is the other end of this lane's edge; the group's own end is fixed.
__device__ inline A tile_score(const Operands& o, int64 mine, int64 own, int64 head, int count, int most, bool own_is_source) {
  const bool has_edge = lane_of_group() < count;
  A held = -infinity();
  for (int k = 0; k < most; ++k) {
    const int64 other = from_lane(mine, k);
    const A score = cooperative_score(o, own_is_source ? own : other, own_is_source ? other : own, head, k < count);
    if (k == lane_of_group() && has_edge) held = score;
  }
  return held;
}

extern "C" __global__ void attention(const int64* indptr, const I* indices, const I* edge_ids, int64 num_rows, const S* value_,
                                     const S* key, const S* query, const S* vector, int64 num_heads, int64 channels, double slope,
                                     double scale, double dropout, int64 seed, S* out, A* high, A* total) {
  const Graph g{indptr, indices, edge_ids, num_rows};
  const Operands o{value_, key, query, vector, num_heads, channels, A(slope), A(scale), Dropout(dropout, seed)};
  const int lane = lane_of_group();
  for (int64 number = group_number(); number < whole_warps(num_rows * num_heads); number += num_groups()) {
    const Item item(number, num_rows, num_heads, indptr);
    for (int64 first_channel = 0; first_channel < channels; first_channel += GROUP * CHUNKS) {
      A sum[CHUNKS] = {};
      A best = -infinity(), mass = A(0);
      for (int64 first = 0; first < item.longest; first += GROUP) {
        const int count = item.count(first), most = item.most(first);
        const int64 entry = item.begin + first + lane;
        const int64 j = lane < count ? int64(indices[entry]) : 0;
        const A score = tile_score(o, j, item.row, item.head, count, most, false);
        const A tile_high = group_max(score), highest = tile_high > best || tile_high != tile_high ? tile_high : best;
        const A shift = highest == -infinity() ? A(0) : highest;  // scores that are all -inf weigh nothing yet
        const A shrink = mass > A(0) ? Epilogue::exponential(best - shift) : A(0);
        A weight = lane < count ? Epilogue::exponential(score - shift) : A(0);
        mass = mass * shrink + group_sum(weight);
        best = count ? highest : best;
        if (o.dropout.is_on() && lane < count) weight *= o.dropout.factor(g.edge(entry), item.head);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) sum[chunk] *= count ? shrink : A(1);
        for (int k = 0; k < most; ++k) {
          const int64 source = from_lane(j, k);
          const A share = from_lane(weight, k);
          if (k >= count) continue;
#pragma unroll
          for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const int64 c = first_channel + chunk * GROUP + lane;
            if (c < channels) sum[chunk] += share * value(o.value[o.at(source, item.head) + c]);
          }
        }
      }
      if (!item.is_real) continue;
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const int64 c = first_channel + chunk * GROUP + lane;
        if (c < channels) keep(out + o.at(item.row, item.head) + c, item.length ? sum[chunk] / mass : A(0));
      }
      if (lane == 0 && first_channel == 0) high[number] = item.length ? best : A(0), total[number] = mass;
    }
  }
}

// dot[i, h] = <dout, out>; a group a row and head.
extern "C" __global__ void attention_dots(const S* out, const S* dout, int64 num_rows, int64 num_heads, int64 channels, A* dot) {
  const int64 count = num_rows * num_heads;
  for (int64 number = group_number(); number < whole_warps(count); number += num_groups()) {
    const bool is_real = number < count;
    const A sum = head_dot(dout + (is_real ? number : 0) * channels, out + (is_real ? number : 0) * channels, channels, is_real);
    if (is_real && lane_of_group() == 0) dot[number] = sum;
  }
}

// The gradients that a source gathers from its out-edges, and each entry's dscore.
// ``indptr`` to ``num_rows`` are of the transposed graph.
extern "C" __global__ void attention_backward_sources(const int64* indptr, const I* indices, const I* edge_ids, int64 num_rows,
                                                      const S* value_, const S* key, const S* query, const S* vector, int64 num_heads,
                                                      int64 channels, double slope, double scale, double dropout, int64 seed,
                                                      const S* dout, const A* high, const A* total, const A* dot, A* dscore, S* dvalue,
                                                      S* dkey) {
  const Graph g{indptr, indices, edge_ids, num_rows};
  const Operands o{value_, key, query, vector, num_heads, channels, A(slope), A(scale), Dropout(dropout, seed)};
  const int lane = lane_of_group();
  for (int64 number = group_number(); number < whole_warps(num_rows * num_heads); number += num_groups()) {
    const Item item(number, num_rows, num_heads, indptr);
    const int64 own = o.at(item.row, item.head);
    for (int64 first_channel = 0; first_channel < channels; first_channel += GROUP * CHUNKS) {
      A sum[CHUNKS] = {}, key_sum[CHUNKS] = {};
      for (int64 first = 0; first < item.longest; first += GROUP) {
        const int count = item.count(first), most = item.most(first);
        const int64 entry = item.begin + first + lane;
        const int64 i = lane < count ? int64(indices[entry]) : 0, stat = i * num_heads + item.head;
        const A score = tile_score(o, i, item.row, item.head, count, most, true);
        A dshare = A(0);
        for (int k = 0; k < most; ++k) {
          const A product = head_dot(dout + o.at(from_lane(i, k), item.head), o.value + own, channels, k < count);
          if (k == lane) dshare = product;
        }
        A weight = A(0), grad = A(0);
        if (lane < count) {
          const A share = Epilogue::exponential(score - high[stat]) / total[stat];
          const A kept = o.dropout.is_on() ? o.dropout.factor(g.edge(entry), item.head) : A(1);
          weight = share * kept;
          grad = share * (dshare * kept - dot[stat]) * (SCORE == kDotProduct ? o.scale : A(1));
          if (first_channel == 0) dscore[entry * num_heads + item.head] = grad;
        }
        for (int k = 0; k < most; ++k) {
          const int64 there = o.at(from_lane(i, k), item.head);
          const A share = from_lane(weight, k), slant = from_lane(grad, k);
          if (k >= count) continue;
#pragma unroll
          for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const int64 c = first_channel + chunk * GROUP + lane;
            if (c >= channels) continue;
            sum[chunk] += share * value(dout[there + c]);
            if (SCORE == kDotProduct) key_sum[chunk] += slant * value(query[there + c]);
            if (SCORE == kGatV2) {
              const A z = value(o.value[own + c]) + value(query[there + c]);
              sum[chunk] += slant * value(vector[item.head * channels + c]) * (z > A(0) ? A(1) : o.slope);
            }
          }
        }
      }
      if (!item.is_real) continue;
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const int64 c = first_channel + chunk * GROUP + lane;
        if (c >= channels) continue;
        keep(dvalue + own + c, sum[chunk]);
        if (SCORE == kDotProduct) keep(dkey + own + c, key_sum[chunk]);
      }
    }
  }
}

// GATv2's gradients of query and vector, from dscore (``edge_ids`` says where an entry's lies): a group a part of neighbouring rows and a head. The vector's comes in num_parts
// partial sums [num_parts, H, C].
extern "C" __global__ void attention_backward_destinations(const int64* indptr, const I* indices, const I* edge_ids, int64 num_rows,
                                                           const S* value_, const S* query, const S* vector, int64 num_heads,
                                                           int64 channels, double slope, const A* dscore, S* dquery, double* dvector_parts,
                                                           int64 num_parts) {
  const Graph g{indptr, indices, edge_ids, num_rows};
  for (int64 number = group_number(); number < num_parts * num_heads; number += num_groups()) {
    const int64 part = number / num_heads, head = number % num_heads;
    for (int64 c = lane_of_group(); c < channels; c += GROUP) {
      const A along = value(vector[head * channels + c]);
      double vector_sum = 0;  // every edge of the graph adds to it
      for (int64 i = part * num_rows / num_parts; i < (part + 1) * num_rows / num_parts; ++i) {
        const A here = value(query[(i * num_heads + head) * channels + c]);
        A sum = A(0), row_vector_sum = A(0);
        for (int64 k = indptr[i]; k < indptr[i + 1]; ++k) {
          const A z = value(value_[(int64(indices[k]) * num_heads + head) * channels + c]) + here;
          const A grad = dscore[g.edge(k) * num_heads + head] * (z > A(0) ? A(1) : A(slope));
          sum += grad * along;
          row_vector_sum += grad * z;
        }
        vector_sum += row_vector_sum;
        keep(dquery + (i * num_heads + head) * channels + c, sum);
      }
      dvector_parts[number * channels + c] = vector_sum;
    }
  }
}
