// Vectors of compile-time width, from one source for AVX-512, AVX2 and anything else: GCC's and Clang's vector extension.
// A width is in lanes; width 1 is the plain scalar, so that every kernel has one body for all widths.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class T, int W>
struct LanesOf {
  typedef T type __attribute__((vector_size(sizeof(T) * W)));
};
template <class T>
struct LanesOf<T, 1> {
  typedef T type;
};
template <class T, int W>
using Lanes = typename LanesOf<T, W>::type;

// What is stored, and what is computed in: bf16 is stored in 16 bits and summed in fp32.
struct bf16 {
  uint16_t bits;
};
template <class S>
using Compute = typename std::conditional<std::is_same<S, double>::value, double, float>::type;
template <class A>
using Signed = typename std::conditional<sizeof(A) == 8, int64_t, int32_t>::type;
template <class S>
constexpr int kLanes = kVectorBytes / sizeof(Compute<S>);

template <int W>
inline Lanes<float, W> load(const float* from) {
  Lanes<float, W> lanes;
  memcpy(&lanes, from, sizeof lanes);
  return lanes;
}
template <int W>
inline Lanes<double, W> load(const double* from) {
  Lanes<double, W> lanes;
  memcpy(&lanes, from, sizeof lanes);
  return lanes;
}
template <int W>
inline Lanes<float, W> load(const bf16* from) {
  Lanes<uint32_t, W> wide;
  if constexpr (W == 1) {
    wide = uint32_t(from->bits) << 16;
  } else {
    Lanes<uint16_t, W> narrow;
    memcpy(&narrow, from, sizeof narrow);
    wide = __builtin_convertvector(narrow, Lanes<uint32_t, W>) << 16;
  }
  Lanes<float, W> lanes;
  memcpy(&lanes, &wide, sizeof lanes);
  return lanes;
}

template <int W>
inline void store(float* to, Lanes<float, W> lanes) {
  memcpy(to, &lanes, sizeof lanes);
}
template <int W>
inline void store(double* to, Lanes<double, W> lanes) {
  memcpy(to, &lanes, sizeof lanes);
}
template <int W>
inline void store(bf16* to, Lanes<float, W> lanes) {  // to nearest, ties to even; a NaN stays one
  Lanes<uint32_t, W> wide;
  memcpy(&wide, &lanes, sizeof wide);
  Lanes<uint32_t, W> rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  Lanes<uint32_t, W> quiet = (wide >> 16) | 0x40;
  rounded = lanes == lanes ? rounded : quiet;
  if constexpr (W == 1) {
    to->bits = uint16_t(rounded);
  } else {
    Lanes<uint16_t, W> narrow = __builtin_convertvector(rounded, Lanes<uint16_t, W>);
    memcpy(to, &narrow, sizeof narrow);
  }
}
template <class S>
inline Compute<S> value(const S* from) {
  return load<1>(from);
}

template <class A, int W>
inline Lanes<A, W> splat(A scalar) {
  if constexpr (W == 1)
    return scalar;
  else
    return scalar - Lanes<A, W>{};
}

template <class A, int W>
inline A sum_of(Lanes<A, W> lanes) {
  if constexpr (W == 1) {
    return lanes;
  } else {
    Lanes<A, W / 2> low, high;
    memcpy(&low, &lanes, sizeof low);
    memcpy(&high, reinterpret_cast<const char*>(&lanes) + sizeof low, sizeof high);
    return sum_of<A, W / 2>(low + high);
  }
}

// a > b ? a : b, lane by lane: b where either is NaN. Compilers don't make the one instruction of it that it is on x86.
template <class A, int W>
inline Lanes<A, W> maximum(Lanes<A, W> a, Lanes<A, W> b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same<A, float>::value && W == 16) return (Lanes<A, W>)_mm512_max_ps((__m512)a, (__m512)b);
  if constexpr (std::is_same<A, double>::value && W == 8) return (Lanes<A, W>)_mm512_max_pd((__m512d)a, (__m512d)b);
#endif
#if defined(__AVX__)
  if constexpr (std::is_same<A, float>::value && W == 8) return (Lanes<A, W>)_mm256_max_ps((__m256)a, (__m256)b);
  if constexpr (std::is_same<A, double>::value && W == 4) return (Lanes<A, W>)_mm256_max_pd((__m256d)a, (__m256d)b);
#endif
  return a > b ? a : b;
}

// Calls f with the widest power of two of lanes that n elements fill, as a std::integral_constant.
template <int Widest, class F>
inline void with_width(int64_t n, F f) {
  if constexpr (Widest > 1) {
    if (n < Widest) return with_width<Widest / 2>(n, f);
  }
  f(std::integral_constant<int, Widest>{});
}

// Calls f<W>(offset) over n >= W elements; the last vector is moved back to end at n, so some elements may be visited twice.
template <int W, class F>
inline void for_vectors(int64_t n, F f) {
  for (int64_t at = 0; at + W <= n; at += W) f(at);
  if (n % W) f(n - W);
}

// Sum of products of n elements.
template <int W, class S>
inline Compute<S> dot(const S* a, const S* b, int64_t n) {
  typedef Compute<S> A;
  Lanes<A, W> sum = splat<A, W>(A(0));
  int64_t at = 0;
  for (; at + W <= n; at += W) sum += load<W>(a + at) * load<W>(b + at);
  A total = sum_of<A, W>(sum);
  if constexpr (W > 1) {
    if (at < n) total += dot<W / 2>(a + at, b + at, n - at);
  }
  return total;
}

// e^x for x in [-87, 88]: 2^n · e^r with |r| ≤ ln 2 / 2, e^r by a minimax polynomial (off by under 1 unit in the last place, measured). NaN
// stays one; anything else outside gives anything.
template <int W>
inline Lanes<float, W> exponential_within(Lanes<float, W> x) {
  typedef Lanes<uint32_t, W> Bits;  // unsigned: outside of the range they wrap
  const float magic = 12582912.0f;  // 1.5 · 2^23: adding it leaves the nearest integer in the lowest bits
  const Lanes<float, W> shifted = x * 1.44269504f + magic, n = shifted - magic;
  const Lanes<float, W> r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Lanes<float, W> p = r * 1.38144668e-3f + 8.36878032e-3f;
  p = p * r + 4.16683942e-2f;
  p = p * r + 1.66665201e-1f;
  p = p * r + 4.99999934e-1f;
  p = p * (r * r) + r + 1.0f;
  Bits bits;
  memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + 0x3f800000u;
  Lanes<float, W> power;
  memcpy(&power, &bits, sizeof power);
  return p * power;
}
// e^x for x ≤ 88, above it anything; results below the normal range are 0.
template <int W>
inline Lanes<float, W> exponential_up_to_88(Lanes<float, W> x) {
  return x < -87.0f ? splat<float, W>(0.0f) : exponential_within<W>(x);
}
template <int W>
inline Lanes<float, W> exponential(Lanes<float, W> x) {
  return x > 88.0f ? splat<float, W>(std::numeric_limits<float>::infinity()) : exponential_up_to_88<W>(x);
}
// fp64 is there for checks, not for speed.
template <int W>
inline Lanes<double, W> exponential(Lanes<double, W> x) {
  if constexpr (W == 1) {
    return std::exp(x);
  } else {
    for (int lane = 0; lane < W; ++lane) x[lane] = std::exp(x[lane]);
    return x;
  }
}

template <int W>
inline Lanes<double, W> exponential_up_to_88(Lanes<double, W> x) {
  return exponential<W>(x);
}

// e^x - 1 for x <= 0, to the last places near 0 too: there by its Taylor polynomial.
template <int W>
inline Lanes<float, W> exponential_less_one(Lanes<float, W> x) {
  Lanes<float, W> p = x * 2.48015873e-5f + 1.98412698e-4f;
  p = p * x + 1.38888889e-3f;
  p = p * x + 8.33333333e-3f;
  p = p * x + 4.16666667e-2f;
  p = p * x + 1.66666667e-1f;
  p = p * x + 0.5f;
  p = p * x * x + x;
  return x > -0.4f ? p : exponential<W>(x) - 1.0f;
}
template <int W>
inline Lanes<double, W> exponential_less_one(Lanes<double, W> x) {
  if constexpr (W == 1) {
    return std::expm1(x);
  } else {
    for (int lane = 0; lane < W; ++lane) x[lane] = std::expm1(x[lane]);
    return x;
  }
}
