// What an epilogue does to each element of a matrix, and its backward: dz = dy · derivative, from y alone; dropout of a sparse matrix.
#include "epilogue.h"
#include "lanes.h"
#include "parallel.h"

#ifndef INDEX
#define INDEX int32_t
#endif

typedef STORAGE S;
typedef INDEX I;
typedef Compute<S> A;

namespace {

// Calls f(row) for all rows, blocks of them on the threads.
template <class F>
void for_rows(int64_t num_rows, int64_t width, int num_threads, F f) {
  const int64_t rows_a_block = 16384 / (width + 1) + 1;
  for_blocks((num_rows + rows_a_block - 1) / rows_a_block, num_threads, [&](int64_t block) {
    const int64_t end = (block + 1) * rows_a_block < num_rows ? (block + 1) * rows_a_block : num_rows;
    for (int64_t row = block * rows_a_block; row < end; ++row) f(row);
  });
}

}  // namespace

extern "C" void finish(const S* x, S* y, int64_t num_rows, int64_t num_features, const S* bias, const S* addend, const S* addend_scale,
                       int activation, double slope, double dropout, int64_t seed, int64_t x_stride, int num_threads) {
  const Epilogue<S> epilogue(nullptr, bias, activation, slope, dropout, seed, addend, addend_scale, num_features);
  with_width<kLanes<S>>(num_features, [&](auto width) {
    constexpr int W = decltype(width)::value;
    for_rows(num_rows, num_features, num_threads, [&](int64_t row) {
      for_vectors<W>(num_features, [&](int64_t at) {
        epilogue.template finish<W>(y + row * num_features + at, load<W>(x + row * x_stride + at), row, at);
      });
    });
  });
}

// Element (row, column) of a dense matrix is kept or not; the entries of a sparse one, or of its transpose, are as theirs.
extern "C" void drop_entries(const int64_t* indptr, const I* indices, int64_t num_rows, const S* values, int is_turned, double probability,
                             int64_t seed, S* out, int num_threads) {
  const Dropout dropout(probability, seed);
  const A scale = A(dropout.scale);
  for_rows(num_rows, num_rows ? indptr[num_rows] / num_rows : 1, num_threads, [&](int64_t row) {
    const uint32_t key = dropout.row_key(row);
    for (int64_t k = indptr[row]; k < indptr[row + 1]; ++k) {
      const bool is_kept = is_turned ? dropout.keeps(dropout.row_key(indices[k]), row) : dropout.keeps(key, indices[k]);
      store<1>(out + k, is_kept ? (values ? value(values + k) : A(1)) * scale : A(0));
    }
  });
}

extern "C" void epilogue_backward(const S* dy, const S* y, int64_t num_rows, int64_t num_features, int activation, double slope,
                                  double dropout, int64_t seed, S* dz, int num_threads) {
  const Epilogue<S> epilogue(nullptr, nullptr, activation, slope, dropout, seed);
  with_width<kLanes<S>>(num_features, [&](auto width) {
    constexpr int W = decltype(width)::value;
    for_rows(num_rows, num_features, num_threads, [&](int64_t row) {
      const int64_t first = row * num_features;
      for_vectors<W>(num_features, [&](int64_t at) {
        store<W>(dz + first + at, load<W>(dy + first + at) * epilogue.template derivative<W>(load<W>(y + first + at), row, at));
      });
    });
  });
}
