// The backward of max and min: each output's gradient goes to the one entry that was taken.
//
// Legend: N rows, M columns, E edges, F features, H heads.
#include "lanes.h"
#include "parallel.h"

typedef STORAGE S;
typedef INDEX I;
typedef Compute<S> A;

namespace {

// 1 in the lanes whose output took this entry, else 0, as a mask over lanes of A.
template <int W>
inline auto took(const I* places, int64_t entry) {
  if constexpr (W == 1) {
    return *places == I(entry);
  } else {
    Lanes<I, W> taken;
    memcpy(&taken, places, sizeof taken);
    return __builtin_convertvector(taken == I(entry), Lanes<Signed<A>, W>);
  }
}

}  // namespace

// dX[j] = col_scale[j] · sum over j's out-edges of weight · row_scale[i] · dY[i] where i took the edge. Walks the transposed graph:
// ``entries`` holds the entry of the graph that each entry of the transposed is; ``edge_ids`` are the transposed's.
extern "C" void extremum_grad_x(const int64_t* indptr, const I* indices, const I* edge_ids, const int64_t* blocks, int64_t num_blocks,
                                const I* entries, const I* places, const S* dy, int64_t num_features, const S* weight,
                                int64_t num_heads, const S* row_scale, const S* col_scale, S* dx, int num_threads) {
  const int64_t channels = num_features / num_heads;
  with_width<kLanes<S>>(channels, [&](auto width) {
    constexpr int W = decltype(width)::value;
    for_blocks(num_blocks, num_threads, [&](int64_t block) {
      for (int64_t row = blocks[block]; row < blocks[block + 1]; ++row) {
        for (int64_t head = 0; head < num_heads; ++head) {
          for_vectors<W>(channels, [&](int64_t within) {
            const int64_t at = head * channels + within;
            Lanes<A, W> sum = splat<A, W>(A(0));
            for (int64_t k = indptr[row]; k < indptr[row + 1]; ++k) {
              const int64_t from = indices[k], edge = edge_ids ? int64_t(edge_ids[k]) : k;
              A factor = weight ? value(weight + edge * num_heads + head) : A(1);
              if (row_scale) factor *= value(row_scale + from);
              const Lanes<A, W> message = load<W>(dy + from * num_features + at) * factor;
              sum += took<W>(places + from * num_features + at, entries[k]) ? message : splat<A, W>(A(0));
            }
            store<W>(dx + row * num_features + at, col_scale ? sum * value(col_scale + row) : sum);
          });
        }
      }
    });
  });
}

// dweight[e, h] = row_scale[i] · col_scale[j] · sum over the head's features that took e of dY[i] · X[j].
extern "C" void extremum_grad_weight(const int64_t* indptr, const I* indices, const I* edge_ids, const int64_t* blocks,
                                     int64_t num_blocks, const I* places, const S* dy, const S* x, int64_t x_stride,
                                     int64_t num_features, int64_t num_heads, const S* row_scale, const S* col_scale, S* dweight,
                                     int num_threads) {
  const int64_t channels = num_features / num_heads;
  for_blocks(num_blocks, num_threads, [&](int64_t block) {
    for (int64_t row = blocks[block]; row < blocks[block + 1]; ++row) {
      for (int64_t k = indptr[row]; k < indptr[row + 1]; ++k) {
        const int64_t from = indices[k], edge = edge_ids ? int64_t(edge_ids[k]) : k;
        A factor = row_scale ? value(row_scale + row) : A(1);
        if (col_scale) factor *= value(col_scale + from);
        for (int64_t head = 0; head < num_heads; ++head) {
          A sum = 0;
          for (int64_t at = head * channels; at < (head + 1) * channels; ++at)
            if (places[row * num_features + at] == I(k)) sum += value(dy + row * num_features + at) * value(x + from * x_stride + at);
          store<1>(dweight + edge * num_heads + head, sum * factor);
        }
      }
    }
  });
}
