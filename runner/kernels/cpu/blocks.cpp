// Y = A X where a community's rows have one owner: edges inside the community first, in a format of their own, then the rest of the row
// from CSR, then one store. Two passes over Y, one a part, would write it twice and read it once more.
//
// INTRA says how edges inside a community are stored: 0 with the rest; 1 a dense tile, for the communities that have one (the others' are
// with the rest); 2 ids within the community, 8 or 16 bits (LOCAL) wide; 3 a bit a pair, for edges without weights. Several rows of a tile
// are worked on together, so that a row of X is loaded once for them all. WEIGHTED: whether edges have factors.
//
// Legend: N rows and columns, F features, P communities, B rows of a community.
#include "parallel.h"
#include "sums.h"
#include "vectors.h"

namespace {

enum { kWithRest, kTiles, kLocal, kBits };

template <int W>
constexpr int kMaxLength = W == kLanes<S> ? kMaxVectors : 2;

}  // namespace

// Everything about a product but X and Y; the layout of ``BlocksCall`` in blocks.py.
struct Call {
  const int64_t* part_ptr;        // [P + 1]
  const int64_t* chunks;          // [num_chunks + 1], communities that a thread takes at a time
  int64_t num_chunks;
  const int64_t* indptr;          // [N + 1], of the rest
  const I* indices;
  const S* weight;                // by entry of the rest, with WEIGHTED
  const int64_t* tile_at;         // [P], where a community's tile [B, B] begins, -1 for none; with kTiles
  const S* tiles;
  const int64_t* local_indptr;    // [N + 1], with kLocal
  const void* local_indices;
  const S* local_weight;
  const int64_t* bits_at;         // [P], where a community's words [B, ceil(B / 64)] begin; with kBits
  const uint64_t* bits;
  int64_t num_features, is_far;   // is_far: whether X is too large for a core's own cache
};

namespace {

template <int W, int NV>
struct Pass {
  const Call& c;
  const S* x;
  S* y;
  const int64_t* offset;
  Entries<W, NV> rest;

  S* row_of_y(int64_t row) const { return y + row * c.num_features; }
  const S* row_of_x(int64_t column) const { return x + column * c.num_features; }

  inline void add_rest(int64_t row, Sums<W, NV>& sums) const { rest.add(c.indptr[row], c.indptr[row + 1], sums); }
  inline void add_local(int64_t part, int64_t row, Sums<W, NV>& sums) const {
    const int64_t first = c.part_ptr[part];
    if constexpr (INTRA == kLocal) {
      const LOCAL* ids = static_cast<const LOCAL*>(c.local_indices);
      for (int64_t at = c.local_indptr[row], end = c.local_indptr[row + 1]; at < end; at += kBank) {
        Sums<W, NV> bank;
        bank.clear();
        for (int64_t k = at; k < (end - at < kBank ? end : at + kBank); ++k) {
          if (WEIGHTED)
            bank.add(row_of_x(first + ids[k]), offset, value(c.local_weight + k));
          else
            bank.add(row_of_x(first + ids[k]), offset);
        }
        sums.add(bank);
      }
    }
    if constexpr (INTRA == kBits) {
      const int64_t num_words = (c.part_ptr[part + 1] - first + 63) / 64;
      const uint64_t* words = c.bits + c.bits_at[part] + (row - first) * num_words;
      for (int64_t w = 0; w < num_words; ++w)
        for (uint64_t word = words[w]; word; word &= word - 1)
          sums.add(row_of_x(first + w * 64 + __builtin_ctzll(word)), offset);
    }
  }
  // R rows of a tile together.
  template <int R>
  inline void tile_rows(const S* tile, int64_t first, int64_t size, int64_t row) const {
    Sums<W, NV> sums[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r].clear();
    for (int64_t k = 0; k < size; ++k) {
      Lanes<A, W> features[NV];
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) features[v] = load<W>(row_of_x(first + k) + offset[v]);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const A factor = value(tile + r * size + k);
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) sums[r].at[v] += features[v] * factor;
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      add_rest(row + r, sums[r]);
      store_row(sums[r], row_of_y(row + r), offset);
    }
  }
  void tile(int64_t part) const {
    constexpr int R = NV <= 2 ? 8 : NV <= 4 ? 4 : 2;
    const int64_t first = c.part_ptr[part], size = c.part_ptr[part + 1] - first;
    const S* tile = c.tiles + c.tile_at[part];
    int64_t r = 0;
    for (; r + R <= size; r += R) tile_rows<R>(tile + r * size, first, size, first + r);
    for (; r < size; ++r) tile_rows<1>(tile + r * size, first, size, first + r);
  }
  void community(int64_t part) const {
    if constexpr (INTRA == kTiles) {
      if (c.tile_at[part] >= 0) return tile(part);
    }
    for (int64_t row = c.part_ptr[part]; row < c.part_ptr[part + 1]; ++row) {
      Sums<W, NV> sums;
      sums.clear();
      add_local(part, row, sums);
      add_rest(row, sums);
      store_row(sums, row_of_y(row), offset);
    }
  }
};

template <int W, int NV>
void pass_of_length(const Call& c, const S* x, S* y, const Vectors& vectors, int64_t begin, int64_t end) {
  if constexpr (NV > 1) {
    if (vectors.count < NV) return pass_of_length<W, NV - 1>(c, x, y, vectors, begin, end);
  }
  const int64_t num_entries = c.indptr[c.part_ptr[c.chunks[c.num_chunks]]];
  const Entries<W, NV> rest{c.indices, c.weight, num_entries, x, c.num_features, vectors.offset, c.is_far != 0};
  const Pass<W, NV> pass{c, x, y, vectors.offset, rest};
  for (int64_t part = begin; part < end; ++part) pass.community(part);
}

}  // namespace

extern "C" void blocks(const Call* call, const S* x, S* y, int num_threads) {
  with_width<kLanes<S>>(call->num_features, [&](auto width) {
    constexpr int W = decltype(width)::value;
    const Cut<W, kMaxLength<W>> cut(0, call->num_features);
    for_blocks(call->num_chunks, num_threads, [&](int64_t chunk) {
      for (int64_t at = 0; at < cut.num_vectors; at += cut.length)
        pass_of_length<W, kMaxLength<W>>(*call, x, y, cut.vectors(at), call->chunks[chunk], call->chunks[chunk + 1]);
    });
  });
}
