// As blocks.cu with dense tiles, their products on the matrix units: in TF32 (UNIT Tf32) or bf16 (Bf16), sums in fp32; the rest of a row is
// added in fp32. A warp takes 16 rows of a community and COLUMNS · 8 features.
//
// Legend: N rows and columns, F features, P communities, B rows of a community.
#include "common.cuh"
#include "mma.cuh"

constexpr int kRows = 16;
constexpr int kNarrow = 8;  // features of one product

// An entry of the tile, 0 outside of it.
__device__ inline float cell(const float* tile, int64 size, int64 row, int64 column) {
  return row < size && column < size ? tile[row * size + column] : 0.0f;
}
__device__ inline float feature(const float* x, int64 num_features, int64 first, int64 size, int64 place, int64 at) {
  return place < size && at < num_features ? x[(first + place) * num_features + at] : 0.0f;
}

extern "C" __global__ void blocks_mma(const int64* part_ptr, int64 num_parts, const int64* indptr, const I* indices, const float* weight,
                                      const int64* starts, const float* tiles, const float* x, int64 num_features, float* y) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, num_warps = int(blockDim.x) / 32;
  const int g = lane / 4, t = lane % 4;
  for (int64 part = blockIdx.x; part < num_parts; part += gridDim.x) {
    const int64 first = part_ptr[part], size = part_ptr[part + 1] - first;
    for (int64 base = int64(blockIdx.y) * COLUMNS * kNarrow; base < num_features; base += int64(gridDim.y) * COLUMNS * kNarrow)
      for (int64 top = warp * kRows; top < size; top += num_warps * kRows) {
        float d[COLUMNS][4] = {};
        if (starts[part] >= 0) {
          const float* tile = tiles + starts[part];
          for (int64 from = 0; from < size; from += UNIT::kDepth) {
            uint32 a[4], b[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int64 k = from + UNIT::depth(half, t);
              a[2 * half] = UNIT::pack(cell(tile, size, top + g, k), cell(tile, size, top + g, k + 1));
              a[2 * half + 1] = UNIT::pack(cell(tile, size, top + g + 8, k), cell(tile, size, top + g + 8, k + 1));
            }
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n) {
              const int64 at = base + n * kNarrow + g;
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const int64 k = from + UNIT::depth(half, t);
                b[half] = UNIT::pack(feature(x, num_features, first, size, k, at), feature(x, num_features, first, size, k + 1, at));
              }
              UNIT::multiply(d[n], a, b);
            }
          }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int64 row = top + g + 8 * half;
          if (row >= size) continue;
          for (int64 entry = indptr[first + row]; entry < indptr[first + row + 1]; ++entry) {
            const float* source = x + int64(indices[entry]) * num_features;
            const float factor = WEIGHTED ? weight[entry] : 1.0f;
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n) {
              const int64 at = base + n * kNarrow + 2 * t;
              if (at < num_features) d[n][2 * half] += source[at] * factor;
              if (at + 1 < num_features) d[n][2 * half + 1] += source[at + 1] * factor;
            }
          }
          float* target = y + (first + row) * num_features;
#pragma unroll
          for (int n = 0; n < COLUMNS; ++n) {
            const int64 at = base + n * kNarrow + 2 * t;
            if (at < num_features) target[at] = d[n][2 * half];
            if (at + 1 < num_features) target[at + 1] = d[n][2 * half + 1];
          }
        }
      }
  }
}
