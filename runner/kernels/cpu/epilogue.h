// What is done to a value before it is stored: scale of its row, an addend, bias of its column, activation, dropout.
#pragma once
#include "lanes.h"
#include "random.h"

enum Activation { kIdentity, kRelu, kElu, kLeakyRelu };

template <int W>
inline Lanes<uint32_t, W> columns_from(int64_t first) {
  Lanes<uint32_t, W> columns;
  if constexpr (W == 1) {
    columns = uint32_t(first);
  } else {
    for (int lane = 0; lane < W; ++lane) columns[lane] = uint32_t(first) + uint32_t(lane);
  }
  return columns;
}

// The factor of dropout for W columns of a row: 0, or 1 / (1 - probability).
template <class A, int W>
inline Lanes<A, W> dropout_factor(const Dropout& dropout, uint32_t row_key, int64_t first_column) {
  Lanes<uint32_t, W> bits = mix(mix(columns_from<W>(first_column) * 0x9e3779b9u ^ row_key) + dropout.low);
  const Lanes<A, W> kept = splat<A, W>(A(dropout.scale)), zero = splat<A, W>(A(0));
  if constexpr (W == 1)
    return bits >= dropout.threshold ? kept : zero;
  else if constexpr (sizeof(A) == 4)
    return bits >= dropout.threshold ? kept : zero;
  else
    return __builtin_convertvector(bits >= dropout.threshold, Lanes<int64_t, W>) ? kept : zero;
}

template <class S>
struct Epilogue {
  typedef Compute<S> A;
  const S* row_scale;  // [N] or null
  const S* bias;       // [F] or null
  int activation;
  A slope;  // of LeakyReLU below 0, or ELU's alpha
  Dropout dropout;
  const S* addend;  // [N, F] or null
  A addend_scale;
  int64_t width;                // F, where there is an addend
  bool is_scale, is_identity;  // is_scale: a row scale at most

  Epilogue(const S* row_scale, const S* bias, int activation, double slope, double probability, int64_t seed, const S* addend = nullptr,
           const S* addend_scale = nullptr, int64_t width = 0)
      : row_scale(row_scale), bias(bias), activation(activation), slope(A(slope)), dropout(probability, seed), addend(addend),
        addend_scale(addend_scale ? value(addend_scale) : A(1)), width(width),
        is_scale(!bias && !addend && !activation && !dropout.is_on()), is_identity(is_scale && !row_scale) {}

  template <int W>
  inline void finish(S* to, Lanes<A, W> z, int64_t row, int64_t column) const {
    if (row_scale) z = z * value(row_scale + row);
    if (addend) z = z + load<W>(addend + row * width + column) * addend_scale;
    if (bias) z = z + load<W>(bias + column);
    if (activation) z = activate<W>(z);
    if (dropout.is_on()) z = z * dropout_factor<A, W>(dropout, dropout.row_key(row), column);
    store<W>(to, z);
  }

  template <int W>
  inline Lanes<A, W> activate(Lanes<A, W> z) const {
    const Lanes<A, W> zero = splat<A, W>(A(0));
    if (activation == kRelu) return z <= zero ? zero : z;  // so that a NaN stays one
    if (activation == kLeakyRelu) return z > zero ? z : z * slope;
    return z > zero ? z : exponential_less_one<W>(z) * slope;
  }

  // The factor that takes the gradient of y to that of what went into activation and dropout; y itself tells on which side it was.
  template <int W>
  inline Lanes<A, W> derivative(Lanes<A, W> y, int64_t row, int64_t column) const {
    const Lanes<A, W> zero = splat<A, W>(A(0)), one = splat<A, W>(A(1));
    Lanes<A, W> kept = dropout.is_on() ? dropout_factor<A, W>(dropout, dropout.row_key(row), column) : one;
    if (activation == kIdentity) return kept;
    if (activation == kRelu) return y > zero ? kept : zero;
    if (activation == kLeakyRelu) return y > zero ? kept : kept * slope;
    Lanes<A, W> undropped = dropout.is_on() ? y / A(dropout.scale) : y;
    return y > zero ? kept : kept * (undropped + slope);
  }
};
