// Y = A X with rows taken in the order of their degrees: rows that follow one another have about as many entries, so the branch at a row's
// end is foreseen; a hub's entries are shared out in segments, whose sums are added up in the end.
//
// Legend: N rows, F features, R rows with at most a segment's entries, G segments of the others.
#include "parallel.h"
#include "sums.h"
#include "vectors.h"

namespace {

template <int W>
constexpr int kMaxLength = W == kLanes<S> ? kMaxVectors : 2;
constexpr int64_t kHubsATime = 8;

}  // namespace

// Everything about a product but X and Y; the layout of ``BinnedCall`` in binned.py.
struct Call {
  const int64_t* indptr;  // [N + 1]
  const I* indices;
  const S* weight;        // by entry, with WEIGHTED
  int64_t num_entries;
  const I* rows;          // [R], by degree
  const int64_t* chunks;  // [num_chunks + 1], of rows, about equal in work
  int64_t num_chunks;
  const int64_t* segments;  // [G, 2]: entries from, to
  int64_t num_segments;
  const int64_t* hubs;      // [num_hubs, 3]: row, segments from, to
  int64_t num_hubs;
  int64_t num_features, is_far;
};

namespace {

template <int W, int NV>
void take(const Call& c, const S* x, S* y, A* scratch, const Vectors& vectors, int64_t job) {
  if constexpr (NV > 1) {
    if (vectors.count < NV) return take<W, NV - 1>(c, x, y, scratch, vectors, job);
  }
  const Entries<W, NV> entries{c.indices, c.weight, c.num_entries, x, c.num_features, vectors.offset, c.is_far != 0};
  Sums<W, NV> sums;
  if (job < c.num_segments) {  // the long ones first
    sums.clear();
    entries.add(c.segments[2 * job], c.segments[2 * job + 1], sums);
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) store<W>(scratch + job * c.num_features + vectors.offset[v], sums.at[v]);
    return;
  }
  const int64_t chunk = job - c.num_segments;
  for (int64_t k = c.chunks[chunk]; k < c.chunks[chunk + 1]; ++k) {
    const int64_t row = c.rows[k];
    sums.clear();
    entries.add(c.indptr[row], c.indptr[row + 1], sums);
    store_row(sums, y + row * c.num_features, vectors.offset);
  }
}

}  // namespace

// scratch: [G, F].
extern "C" void binned(const Call* call, const S* x, S* y, A* scratch, int num_threads) {
  const Call& c = *call;
  with_width<kLanes<S>>(c.num_features, [&](auto width) {
    constexpr int W = decltype(width)::value;
    const Cut<W, kMaxLength<W>> cut(0, c.num_features);
    for_blocks(c.num_segments + c.num_chunks, num_threads, [&](int64_t job) {
      for (int64_t at = 0; at < cut.num_vectors; at += cut.length)
        take<W, kMaxLength<W>>(c, x, y, scratch, cut.vectors(at), job);
    });
    for_blocks((c.num_hubs + kHubsATime - 1) / kHubsATime, num_threads, [&](int64_t block) {
      const int64_t end = (block + 1) * kHubsATime < c.num_hubs ? (block + 1) * kHubsATime : c.num_hubs;
      for (int64_t hub = block * kHubsATime; hub < end; ++hub) {
        const int64_t* told = c.hubs + 3 * hub;
        for_vectors<W>(c.num_features, [&](int64_t at) {
          Lanes<A, W> sum = splat<A, W>(A(0));
          for (int64_t k = told[1]; k < told[2]; ++k) sum += load<W>(scratch + k * c.num_features + at);
          store<W>(y + told[0] * c.num_features + at, sum);
        });
      }
    });
  });
}
