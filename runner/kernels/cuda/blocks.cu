// Y = A X where a community's rows have one owner: a block of threads takes a community, edges inside it first, then the rest of each row
// from CSR, then one store. The community's rows of X lie in shared memory where they fit (ROWS of them; 0: they are read where they are).
//
// A group of lanes owns a row and, by blockIdx.y, a slice of GROUP · VEC features. INTRA says how edges inside are stored: 0 with the rest;
// 1 a dense tile, for communities that have one; 2 ids within the community (LOCAL); 3 a bit a pair. WEIGHTED: whether edges have factors.
//
// Legend: N rows and columns, F features, P communities, B rows of a community.
#include "common.cuh"

enum { kWithRest, kTiles, kLocal, kBits };
constexpr int64 kBank = 64;  // entries of a row that are summed before they join its total: long rows then round as short ones
typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned long long uint64;

struct Rows {
  const S* x;
  const Packed<S, VEC>* staged;  // null: not staged
  int64 num_features, first, at;
  __device__ void far(int64 column, A* to) const { load(x + column * num_features + at, to); }
  __device__ void near(int64 place, A* to) const {  // place: within the community
    if (!staged) return far(first + place, to);
    const Packed<S, VEC> packed = staged[place * GROUP + lane_of_group()];
#pragma unroll
    for (int k = 0; k < VEC; ++k) to[k] = value(packed.at[k]);
  }
};

__device__ inline void add(A* sum, const A* message, A factor) {
#pragma unroll
  for (int k = 0; k < VEC; ++k) sum[k] += message[k] * factor;
}

struct Inside {
  const int64* starts;
  const void* held;
  const S* weight;
  __device__ void add_row(const Rows& rows, int64 part, int64 row, int64 size, A* sum) const {
    A message[VEC];
    if (INTRA == kTiles && starts[part] >= 0) {
      const S* tile = static_cast<const S*>(held) + starts[part] + row * size;
      for (int64 k = 0; k < size; ++k) rows.near(k, message), add(sum, message, value(tile[k]));
    }
    if (INTRA == kLocal) {
      const LOCAL* ids = static_cast<const LOCAL*>(held);
      for (int64 k = starts[rows.first + row]; k < starts[rows.first + row + 1]; ++k)
        rows.near(ids[k], message), add(sum, message, WEIGHTED ? value(weight[k]) : A(1));
    }
    if (INTRA == kBits) {
      const int64 num_words = (size + 63) / 64;
      const uint64* words = static_cast<const uint64*>(held) + starts[part] + row * num_words;
      for (int64 w = 0; w < num_words; ++w)
        for (uint64 word = words[w]; word; word &= word - 1)
          rows.near(w * 64 + __ffsll((long long)(word)) - 1, message), add(sum, message, A(1));
    }
  }
};

extern "C" __global__ void blocks(const int64* part_ptr, int64 num_parts, const int64* indptr, const I* indices, const S* weight,
                                  const int64* starts, const void* held, const S* inside_weight, const S* x, int64 num_features, S* y) {
  __shared__ Packed<S, VEC> staged[ROWS > 0 ? ROWS * GROUP : 1];
  const Inside inside{starts, held, inside_weight};
  const int num_groups_here = int(blockDim.x) / GROUP, group = int(threadIdx.x) / GROUP;
  for (int64 part = blockIdx.x; part < num_parts; part += gridDim.x) {
    const int64 first = part_ptr[part], size = part_ptr[part + 1] - first;
    for (int64 slice = blockIdx.y; slice * GROUP * VEC < num_features; slice += gridDim.y) {
      const int64 at = (slice * GROUP + lane_of_group()) * VEC;
      const bool is_mine = at < num_features;
      if (ROWS > 0) {
        __syncthreads();  // some may still read the rows of the slice before
        for (int64 k = group; k < size; k += num_groups_here)
          if (is_mine) staged[k * GROUP + lane_of_group()] = *reinterpret_cast<const Packed<S, VEC>*>(x + (first + k) * num_features + at);
        __syncthreads();
      }
      const Rows rows{x, ROWS > 0 ? staged : nullptr, num_features, first, at};
      for (int64 row = group; row < size; row += num_groups_here) {
        if (!is_mine) continue;
        A sum[VEC] = {}, bank[VEC] = {}, message[VEC];
        inside.add_row(rows, part, row, size, sum);
        const int64 begin = indptr[first + row], end = indptr[first + row + 1];
        for (int64 entry = begin; entry < end; ++entry) {
          if ((entry - begin) % kBank == 0) {
#pragma unroll
            for (int k = 0; k < VEC; ++k) sum[k] += bank[k], bank[k] = A(0);
          }
          rows.far(indices[entry], message);
          add(bank, message, WEIGHTED ? value(weight[entry]) : A(1));
        }
#pragma unroll
        for (int k = 0; k < VEC; ++k) sum[k] += bank[k];
        store(y + (first + row) * num_features + at, sum);
      }
    }
  }
}
