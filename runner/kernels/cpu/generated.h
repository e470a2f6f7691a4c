// What generated kernels are made of: edges of a row in tiles, small formulas with a lane an edge, wide ones with a lane a channel.
//
// Legend: E edges, C channels of a message.
#pragma once
#include "epilogue.h"
#include "lanes.h"
#include "parallel.h"

typedef STORAGE S;
typedef INDEX I;
typedef Compute<S> A;

constexpr int C = CHANNELS;
constexpr int kEdges = kLanes<S>;
constexpr int64_t kTile = 128;         // edges; a multiple of kEdges
constexpr int64_t kPrefetchAhead = 8;  // edges

constexpr int widest(int lanes) { return lanes <= C ? lanes : widest(lanes / 2); }
constexpr int W = widest(kLanes<S>);
constexpr int NV = (C + W - 1) / W;
typedef Lanes<A, W> Vector;
typedef Lanes<A, kEdges> Edges;

// Where vector v begins: the last is moved back to end at C, so some channels are visited twice.
constexpr int64_t offset_of(int v) { return v * W + W <= C ? v * W : C - W; }

struct Graph {
  const int64_t* indptr;
  const I* indices;
  const I* edge_ids;
  const int64_t* blocks;
  int64_t num_blocks, num_entries;
  int64_t edge(int64_t entry) const { return edge_ids ? int64_t(edge_ids[entry]) : entry; }
};

template <class V>
inline V all(A scalar) {
  if constexpr (sizeof(V) == sizeof(A))
    return scalar;
  else
    return scalar - V{};
}

// Where a condition holds, by lane.
template <int N, class F>
inline Lanes<Signed<A>, N> in_lanes(F condition) {
  Lanes<Signed<A>, N> found;
  for (int lane = 0; lane < N; ++lane) found[lane] = condition(lane) ? -1 : 0;
  return found;
}

// The lanes of vector v that no vector before it had; 0 in the others.
template <int N = W>
inline Lanes<A, N> fresh(int v, Lanes<A, N> lanes) {
  if constexpr (N > 1 && C % N != 0) {
    if (v == NV - 1) return in_lanes<N>([](int lane) { return lane >= N - C % N; }) ? lanes : Lanes<A, N>{};
  }
  return lanes;
}
// The lanes of the first ``count`` edges; 0 in the others.
template <int N = kEdges>
inline Lanes<A, N> only(int64_t count, Lanes<A, N> lanes) {
  if constexpr (N > 1) {
    if (count < N) return in_lanes<N>([=](int lane) { return lane < count; }) ? lanes : Lanes<A, N>{};
  }
  return lanes;
}

// A number of each edge's far end, or of the edge itself; lanes behind the last edge repeat it.
inline Edges gather(int64_t count, const I* indices, const S* from, int64_t width) {
  A lanes[kEdges];
  for (int at = 0; at < kEdges; ++at) lanes[at] = value(from + int64_t(indices[at < count ? at : count - 1]) * width);
  return load<kEdges>(lanes);
}
inline Edges gather_edges(int64_t count, const I* edge_ids, int64_t first, const S* from, int64_t width) {
  A lanes[kEdges];
  for (int at = 0; at < kEdges; ++at) {
    const int64_t entry = first + (at < count ? at : count - 1);
    lanes[at] = value(from + (edge_ids ? int64_t(edge_ids[entry]) : entry) * width);
  }
  return load<kEdges>(lanes);
}
inline void scatter(int64_t count, const I* edge_ids, int64_t first, S* to, int64_t width, Edges values) {
  A lanes[kEdges];
  store<kEdges>(lanes, values);
  for (int at = 0; at < kEdges && at < count; ++at)
    store<1>(to + (edge_ids ? int64_t(edge_ids[first + at]) : first + at) * width, lanes[at]);
}

template <int N>
inline void keep(double* to, Lanes<A, N> lanes) {
  A room[N];
  store<N>(room, lanes);
  for (int at = 0; at < N; ++at) to[at] = double(room[at]);
}
inline void prefetch(const S* row, int64_t width) {
  for (int64_t at = 0; at < width; at += 64 / int64_t(sizeof(S))) __builtin_prefetch(row + at);
}

// --- functions of lanes ------------------------------------------------------------------------------------------------------------

template <int N>
inline Lanes<A, N> positive_of(Lanes<A, N> x, Lanes<A, N> yes, Lanes<A, N> no) {
  return x > Lanes<A, N>{} ? yes : no;
}
template <int N>
inline Lanes<A, N> relu_of(Lanes<A, N> x) {
  return x <= Lanes<A, N>{} ? Lanes<A, N>{} : x;  // so that a NaN stays one
}
template <int N>
inline Lanes<A, N> leaky_relu_of(Lanes<A, N> x, A slope) {
  return x > Lanes<A, N>{} ? x : x * slope;
}
template <int N>
inline Lanes<A, N> exp_of(Lanes<A, N> x) {
  return exponential<N>(x);
}
template <int N>
inline Lanes<A, N> elu_of(Lanes<A, N> x, A alpha) {
  const Lanes<A, N> below = x > Lanes<A, N>{} ? Lanes<A, N>{} : x;
  return x > Lanes<A, N>{} ? x : exponential_less_one<N>(below) * alpha;
}
template <int N>
inline Lanes<A, N> tanh_of(Lanes<A, N> x) {  // from e^(-2|x|) - 1, which is exact near 0
  const Lanes<A, N> less = exponential_less_one<N>((x > Lanes<A, N>{} ? -x : x) * A(2));
  const Lanes<A, N> size = -less / (less + A(2));
  return x > Lanes<A, N>{} ? size : -size;
}
template <int N>
inline Lanes<A, N> sigmoid_of(Lanes<A, N> x) {
  const Lanes<A, N> small = exponential<N>(x > Lanes<A, N>{} ? -x : x), larger = A(1) / (small + A(1));
  return x > Lanes<A, N>{} ? larger : small * larger;
}
template <int N, class F>
inline Lanes<A, N> each(Lanes<A, N> x, F f) {
  if constexpr (N == 1) {
    return f(x);
  } else {
    for (int lane = 0; lane < N; ++lane) x[lane] = f(x[lane]);
    return x;
  }
}
template <int N>
inline Lanes<A, N> softplus_of(Lanes<A, N> x) {
  const Lanes<A, N> small = exponential<N>(x > Lanes<A, N>{} ? -x : x);
  return (x > Lanes<A, N>{} ? x : Lanes<A, N>{}) + each<N>(small, [](A y) { return std::log1p(y); });
}
template <int N>
inline Lanes<A, N> sqrt_of(Lanes<A, N> x) {
  return each<N>(x, [](A y) { return std::sqrt(y); });
}
