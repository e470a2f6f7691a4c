// The backward of what an epilogue did to each element: dz = dy · derivative, from y alone. A thread an element.
#include "common.cuh"

extern "C" __global__ void epilogue_backward(const S* dy, const S* y, int64 num_rows, int64 num_features, int64 activation,
                                             double slope, double dropout, int64 seed, S* dz) {
  const Epilogue epilogue{nullptr, nullptr, int(activation), A(slope), Dropout(dropout, seed)};
  const int64 size = num_rows * num_features;
  for (int64 at = int64(blockIdx.x) * blockDim.x + threadIdx.x; at < size; at += int64(gridDim.x) * blockDim.x)
    keep(dz + at, value(dy[at]) * epilogue.derivative(value(y[at]), at / num_features, at % num_features));
}
