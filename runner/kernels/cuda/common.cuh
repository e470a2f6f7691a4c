// Shared by all kernels: types, vectors of features, groups of lanes, dropout by seed, the epilogue.
//
// A row (or a row and head) is worked on by a group of GROUP neighbouring lanes of a warp, each with VEC features at a time. Built for one
// STORAGE (float, double, bf16), INDEX (int, int64), GROUP (1 … 32) and VEC (1, or as many as 16 bytes hold); sums are in fp32, or fp64 for
// double. Nothing is added atomically: each output has one owner, so equal inputs give equal bits. Grids may be smaller than the work:
// every kernel strides over what is left. Counts and offsets are 64 bits wide.

typedef long long int64;
typedef unsigned int uint32;
struct bf16 {
  unsigned short bits;
};
template <class S>
struct ComputeOf {
  typedef float type;
};
template <>
struct ComputeOf<double> {
  typedef double type;
};
typedef STORAGE S;
typedef INDEX I;
typedef ComputeOf<STORAGE>::type A;

union Bits {
  float number;
  uint32 bits;
};
__device__ inline float float_of(uint32 bits) {
  Bits both;
  both.bits = bits;
  return both.number;
}
__device__ inline A infinity() { return A(float_of(0x7f800000u)); }

__device__ inline float value(float stored) { return stored; }
__device__ inline double value(double stored) { return stored; }
__device__ inline float value(bf16 stored) { return float_of(uint32(stored.bits) << 16); }
__device__ inline void keep(float* to, float number) { *to = number; }
__device__ inline void keep(double* to, double number) { *to = number; }
__device__ inline void keep(bf16* to, float number) {  // to nearest, ties to even; a NaN stays one
  Bits both;
  both.number = number;
  const uint32 rounded = (both.bits + 0x7fff + ((both.bits >> 16) & 1)) >> 16;
  to->bits = (unsigned short)(number == number ? rounded : (both.bits >> 16) | 0x40);
}

// VEC neighbouring features, moved in one access where they are aligned (the launcher sees to it that VEC > 1 means so).
template <class T, int N>
struct alignas(sizeof(T) * N) Packed {
  T at[N];
};
__device__ inline void load(const S* from, A* to) {
  const Packed<S, VEC> packed = *reinterpret_cast<const Packed<S, VEC>*>(from);
#pragma unroll
  for (int k = 0; k < VEC; ++k) to[k] = value(packed.at[k]);
}
__device__ inline void store(S* to, const A* from) {
  Packed<S, VEC> packed;
#pragma unroll
  for (int k = 0; k < VEC; ++k) keep(&packed.at[k], from[k]);
  *reinterpret_cast<Packed<S, VEC>*>(to) = packed;
}

constexpr uint32 kAllLanes = 0xffffffffu;
__device__ inline int lane_of_group() { return int(threadIdx.x) % GROUP; }
__device__ inline int64 group_number() { return (int64(blockIdx.x) * blockDim.x + threadIdx.x) / GROUP; }
__device__ inline int64 num_groups() { return int64(gridDim.x) * blockDim.x / GROUP; }
// Rounds up to whole warps: all lanes of a warp take part in each exchange, also those whose group has nothing left to do.
__device__ inline int64 whole_warps(int64 count) {
  const int64 groups_a_warp = 32 / GROUP;
  return (count + groups_a_warp - 1) / groups_a_warp * groups_a_warp;
}
__device__ inline A group_sum(A x) {
#pragma unroll
  for (int step = GROUP / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step, GROUP);
  return x;
}
__device__ inline A group_max(A x) {  // a NaN is the largest
#pragma unroll
  for (int step = GROUP / 2; step > 0; step /= 2) {
    const A other = __shfl_xor_sync(kAllLanes, x, step, GROUP);
    x = other > x || other != other ? other : x;
  }
  return x;
}
// Largest over the whole warp: groups of different length walk their tiles together.
__device__ inline int64 warp_max(int64 x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const int64 other = __shfl_xor_sync(kAllLanes, x, step, 32);
    x = other > x ? other : x;
  }
  return x;
}

struct Graph {
  const int64* indptr;
  const I* indices;
  const I* edge_ids;  // null: entry k is edge k
  int64 num_rows;
  __device__ int64 edge(int64 entry) const { return edge_ids ? int64(edge_ids[entry]) : entry; }
};

// The same 32 bits for (seed, row, column) as cpu/random.h has.
__device__ inline uint32 mix(uint32 x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}
struct Dropout {
  uint32 low, high, threshold;
  A scale;
  __device__ Dropout(double probability, int64 seed)
      : low(mix(uint32(seed))), high(mix(uint32((unsigned long long)(seed) >> 32) + 0x9e3779b9u)),
        threshold(uint32(probability * 4294967296.0)), scale(A(1.0 / (1.0 - probability))) {}
  __device__ bool is_on() const { return threshold != 0; }
  __device__ A factor(int64 row, int64 column) const {
    const uint32 key = mix(mix(uint32(row) ^ low) + uint32((unsigned long long)(row) >> 32) + high);
    return mix(mix(uint32(column) * 0x9e3779b9u ^ key) + low) >= threshold ? scale : A(0);
  }
};

enum Activation { kIdentity, kRelu, kElu, kLeakyRelu };
struct Epilogue {
  const S* row_scale;
  const S* bias;
  int activation;
  A slope;
  Dropout dropout;
  const S* addend;  // [N, F] or null
  A addend_scale;
  int64 width;  // F, where there is an addend
  __device__ A finish(A z, int64 row, int64 column) const {
    if (row_scale) z *= value(row_scale[row]);
    if (addend) z += value(addend[row * width + column]) * addend_scale;
    if (bias) z += value(bias[column]);
    if (activation == kRelu) z = z <= A(0) ? A(0) : z;
    if (activation == kLeakyRelu) z = z > A(0) ? z : z * slope;
    if (activation == kElu) z = z > A(0) ? z : less_one(z) * slope;
    return dropout.is_on() ? z * dropout.factor(row, column) : z;
  }
  __device__ A derivative(A y, int64 row, int64 column) const {
    const A kept = dropout.is_on() ? dropout.factor(row, column) : A(1);
    if (activation == kIdentity) return kept;
    if (activation == kRelu) return y > A(0) ? kept : A(0);
    if (activation == kLeakyRelu) return y > A(0) ? kept : kept * slope;
    return y > A(0) ? kept : kept * ((dropout.is_on() ? y / dropout.scale : y) + slope);
  }
  __device__ static float exponential(float x) { return expf(x); }
  __device__ static double exponential(double x) { return exp(x); }
  __device__ static float less_one(float x) { return expm1f(x); }
  __device__ static double less_one(double x) { return expm1(x); }
};
