// What generated kernels are made of: functions of a number.
#include "common.cuh"

__device__ inline A positive_of(A x, A yes, A no) { return x > A(0) ? yes : no; }
__device__ inline A relu_of(A x) { return x <= A(0) ? A(0) : x; }  // so that a NaN stays one
__device__ inline A leaky_relu_of(A x, A slope) { return x > A(0) ? x : x * slope; }
__device__ inline A elu_of(A x, A alpha) { return x > A(0) ? x : Epilogue::less_one(x) * alpha; }
__device__ inline A exp_of(A x) { return Epilogue::exponential(x); }
__device__ inline float root(float x) { return sqrtf(x); }
__device__ inline double root(double x) { return sqrt(x); }
__device__ inline float log_of_more(float x) { return log1pf(x); }
__device__ inline double log_of_more(double x) { return log1p(x); }
__device__ inline A sqrt_of(A x) { return root(x); }
__device__ inline A tanh_of(A x) {  // from e^(-2|x|) - 1, which is exact near 0
  const A less = Epilogue::less_one((x > A(0) ? -x : x) * A(2)), size = -less / (less + A(2));
  return x > A(0) ? size : -size;
}
__device__ inline A sigmoid_of(A x) {
  const A small = Epilogue::exponential(x > A(0) ? -x : x), larger = A(1) / (small + A(1));
  return x > A(0) ? larger : small * larger;
}
__device__ inline A softplus_of(A x) { return (x > A(0) ? x : A(0)) + log_of_more(Epilogue::exponential(x > A(0) ? -x : x)); }
