// Softmax of values per edge over the edges that share a destination, per head, and its backward.
//
// Legend: N rows, E edges, H heads.
#include "heads.h"
#include "lanes.h"
#include "parallel.h"

typedef STORAGE S;
typedef INDEX I;
typedef Compute<S> A;

namespace {

template <int H>
inline void gather(const S* from, A* to, int64_t num_heads) {
  for (int64_t h = 0; h < (H ? H : num_heads); ++h) to[h] = value(from + h);
}
template <int H>
inline void scatter(const A* from, S* to, int64_t num_heads) {
  for (int64_t h = 0; h < (H ? H : num_heads); ++h) store<1>(to + h, from[h]);
}

}  // namespace

extern "C" void edge_softmax(const int64_t* indptr, const I* edge_ids, const int64_t* blocks, int64_t num_blocks, const S* logits,
                             int64_t num_heads, S* out, int num_threads) {
  with_heads(num_heads, [&](auto heads) {
    constexpr int H = decltype(heads)::value;
    for_blocks(num_blocks, num_threads, [&](int64_t block) {
      HeadRows<A> rows(num_heads);
      std::vector<A> inverse(rows.total.size());
      for (int64_t row = blocks[block]; row < blocks[block + 1]; ++row) {
        const int64_t begin = indptr[row], count = indptr[row + 1] - begin;
        if (count == 0) continue;
        rows.resize(count, -std::numeric_limits<A>::infinity());
        for (int64_t k = 0; k < count; ++k)
          gather<H>(logits + (edge_ids ? int64_t(edge_ids[begin + k]) : begin + k) * num_heads, rows.row(k), num_heads);
        rows.find_high();
        rows.exponentiate();
        for (size_t lane = 0; lane < inverse.size(); ++lane) inverse[lane] = A(1) / rows.total[lane];
        rows.scale(inverse.data());
        for (int64_t k = 0; k < count; ++k)
          scatter<H>(rows.row(k), out + (edge_ids ? int64_t(edge_ids[begin + k]) : begin + k) * num_heads, num_heads);
      }
    });
  });
}

// dlogits = a · (da - sum over the destination's edges of a · da).
extern "C" void edge_softmax_backward(const int64_t* indptr, const I* edge_ids, const int64_t* blocks, int64_t num_blocks, const S* a,
                                      const S* da, int64_t num_heads, S* dlogits, int num_threads) {
  with_heads(num_heads, [&](auto heads) {
    constexpr int H = decltype(heads)::value;
    for_blocks(num_blocks, num_threads, [&](int64_t block) {
      std::vector<A> dot(num_heads);
      const int64_t n = H ? H : num_heads;
      for (int64_t row = blocks[block]; row < blocks[block + 1]; ++row) {
        for (int64_t h = 0; h < n; ++h) dot[h] = 0;
        for (int64_t k = indptr[row]; k < indptr[row + 1]; ++k) {
          const int64_t at = (edge_ids ? int64_t(edge_ids[k]) : k) * n;
          for (int64_t h = 0; h < n; ++h) dot[h] += value(a + at + h) * value(da + at + h);
        }
        for (int64_t k = indptr[row]; k < indptr[row + 1]; ++k) {
          const int64_t at = (edge_ids ? int64_t(edge_ids[k]) : k) * n;
          for (int64_t h = 0; h < n; ++h) store<1>(dlogits + at + h, value(a + at + h) * (value(da + at + h) - dot[h]));
        }
      }
    });
  });
}
