// What an epilogue does to each element of a matrix, and its backward: dz = dy · derivative, from y alone; dropout of a sparse matrix.
// A thread an element, or an entry.
#include "common.cuh"

extern "C" __global__ void finish(const S* x, S* y, int64 num_rows, int64 num_features, const S* bias, const S* addend,
                                  const S* addend_scale, int64 activation, double slope, double dropout, int64 seed, int64 x_stride) {
  const Epilogue epilogue{nullptr, bias, int(activation), A(slope), Dropout(dropout, seed), addend,
                          addend_scale ? value(*addend_scale) : A(1), num_features};
  const int64 size = num_rows * num_features;
  for (int64 at = int64(blockIdx.x) * blockDim.x + threadIdx.x; at < size; at += int64(gridDim.x) * blockDim.x) {
    const int64 row = at / num_features, column = at % num_features;
    keep(y + at, epilogue.finish(value(x[row * x_stride + column]), row, column));
  }
}

// Element (rows[k], columns[k]) of a dense matrix is kept or not; entry k of a sparse one is as it is.
extern "C" __global__ void drop_entries(const I* rows, const I* columns, int64 num_entries, const S* values, double probability,
                                        int64 seed, S* out) {
  const Dropout dropout(probability, seed);
  for (int64 k = int64(blockIdx.x) * blockDim.x + threadIdx.x; k < num_entries; k += int64(gridDim.x) * blockDim.x)
    keep(out + k, (values ? value(values[k]) : A(1)) * dropout.factor(rows[k], columns[k]));
}

extern "C" __global__ void epilogue_backward(const S* dy, const S* y, int64 num_rows, int64 num_features, int64 activation,
                                             double slope, double dropout, int64 seed, S* dz) {
  const Epilogue epilogue{nullptr, nullptr, int(activation), A(slope), Dropout(dropout, seed), nullptr, A(1), 0};
  const int64 size = num_rows * num_features;
  for (int64 at = int64(blockIdx.x) * blockDim.x + threadIdx.x; at < size; at += int64(gridDim.x) * blockDim.x)
    keep(dz + at, value(dy[at]) * epilogue.derivative(value(y[at]), at / num_features, at % num_features));
}
