// A value per edge from the rows of its ends: OPERATION 0 dot (per head), 1 add, 2 sub, 3 mul of U[source] and V[destination].
//
// Legend: N rows, M columns, E edges, F features, H heads.
#include "lanes.h"
#include "parallel.h"

typedef STORAGE S;
typedef INDEX I;
typedef Compute<S> A;

enum { kDot, kAdd, kSub, kMul };
constexpr int64_t kPrefetchAhead = 12;  // edges

template <int W>
inline Lanes<A, W> combine(Lanes<A, W> u, Lanes<A, W> v) {
  return OPERATION == kAdd ? u + v : OPERATION == kSub ? u - v : u * v;
}

extern "C" void sddmm(const int64_t* indptr, const I* indices, const I* edge_ids, const int64_t* blocks, int64_t num_blocks,
                      int64_t num_entries, const S* u, int64_t u_stride, const S* v, int64_t v_stride, int64_t num_features, int64_t num_heads, S* out,
                      int num_threads) {
  const int64_t channels = num_features / num_heads, out_width = OPERATION == kDot ? num_heads : num_features;
  with_width<kLanes<S>>(OPERATION == kDot ? channels : num_features, [&](auto width) {
    constexpr int W = decltype(width)::value;
    for_blocks(num_blocks, num_threads, [&](int64_t block) {
      for (int64_t row = blocks[block]; row < blocks[block + 1]; ++row) {
        const S* here = v + row * v_stride;
        for (int64_t entry = indptr[row]; entry < indptr[row + 1]; ++entry) {
          const S* there = u + int64_t(indices[entry]) * u_stride;
          if (entry + kPrefetchAhead < num_entries) {
            const int64_t later = entry + kPrefetchAhead;
            for (int64_t at = 0; at < num_features; at += 64 / int64_t(sizeof(S))) __builtin_prefetch(u + int64_t(indices[later]) * u_stride + at);
            if (edge_ids) __builtin_prefetch(out + int64_t(edge_ids[later]) * out_width, 1);
          }
          S* to = out + (edge_ids ? int64_t(edge_ids[entry]) : entry) * out_width;
          if constexpr (OPERATION == kDot) {
            for (int64_t head = 0; head < num_heads; ++head)
              store<1>(to + head, dot<W>(there + head * channels, here + head * channels, channels));
          } else {
            for_vectors<W>(num_features, [&](int64_t at) { store<W>(to + at, combine<W>(load<W>(there + at), load<W>(here + at))); });
          }
        }
      }
    });
  });
}
