// The backward of what an epilogue did to each element: dz = dy · derivative, from y alone.
#include "epilogue.h"
#include "lanes.h"
#include "parallel.h"

typedef STORAGE S;
typedef Compute<S> A;

extern "C" void epilogue_backward(const S* dy, const S* y, int64_t num_rows, int64_t num_features, int activation, double slope,
                                  double dropout, int64_t seed, S* dz, int num_threads) {
  const Epilogue<S> epilogue(nullptr, nullptr, activation, slope, dropout, seed);
  const int64_t rows_a_block = 16384 / num_features + 1;
  with_width<kLanes<S>>(num_features, [&](auto width) {
    constexpr int W = decltype(width)::value;
    for_blocks((num_rows + rows_a_block - 1) / rows_a_block, num_threads, [&](int64_t block) {
      const int64_t end = (block + 1) * rows_a_block < num_rows ? (block + 1) * rows_a_block : num_rows;
      for (int64_t row = block * rows_a_block; row < end; ++row) {
        const int64_t first = row * num_features;
        for_vectors<W>(num_features, [&](int64_t at) {
          store<W>(dz + first + at, load<W>(dy + first + at) * epilogue.derivative<W>(load<W>(y + first + at), row, at));
        });
      }
    });
  });
}
