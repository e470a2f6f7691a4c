// Dropout masks from torch's own stream of random numbers, and their use.
//
// torch draws a mask one element at a time: two words of a Mersenne Twister (MT19937) each, 11 ns. Here the generator's state is advanced and
// compared in vectors, 1 ns, to the same masks bit for bit and the same state afterwards.
//
// Source: Matsumoto and Nishimura, 1998 (the generator). Legend: N rows, F features.
#ifndef __clang__
#pragma GCC optimize("O3")  // loops over 227 and 396 words are left scalar at -O2
#endif
#include <cmath>
#include <cstdint>
#include <cstring>

#include "parallel.h"

typedef STORAGE S;

namespace {

constexpr int kWords = 624, kShift = 397;  // of the generator

// A generator: words, and how many of them are left before they have to be made anew.
struct Twister {
  uint32_t word[kWords];
  int left;

  static inline uint32_t twisted(uint32_t upper, uint32_t lower) {
    return (((upper & 0x80000000u) | (lower & 0x7fffffffu)) >> 1) ^ (-(lower & 1u) & 0x9908b0dfu);
  }
  void renew() {
    for (int k = 0; k < kWords - kShift; ++k) word[k] = word[k + kShift] ^ twisted(word[k], word[k + 1]);
    for (int k = kWords - kShift; k < kWords - 1; ++k) word[k] = word[k + kShift - kWords] ^ twisted(word[k], word[k + 1]);
    word[kWords - 1] = word[kShift - 1] ^ twisted(word[kWords - 1], word[0]);
    left = kWords;
  }
  // Gives `count` tempered words, even over several renewals.
  void give(int count, uint32_t* out) {
    while (count) {
      if (!left) renew();
      const int now = count < left ? count : left;
      const uint32_t* from = word + kWords - left;
      for (int k = 0; k < now; ++k) {
        uint32_t y = from[k];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        out[k] = y ^ (y >> 18);
      }
      left -= now, count -= now, out += now;
    }
  }
};

constexpr int kBatch = 8 * kWords;  // elements drawn at a time

// An element is kept where its 53-bit number, high word first, is below the threshold.
inline void compare(const uint64_t* pairs, int count, uint64_t threshold, uint8_t* kept) {
  for (int k = 0; k < count; ++k) {
    const uint64_t number = ((pairs[k] << 32) | (pairs[k] >> 32)) & ((uint64_t(1) << 53) - 1);
    kept[k] = number < threshold;
  }
}

}  // namespace

// Draws a mask [N, F] in the order of the elements, and puts row i at row place[i] (at i without `place`).
//
// words: the generator's, one of 32 bits in each 64; left: how many remain, plus one; both are brought forward.
extern "C" void draw_mask(uint64_t* words, int32_t* left, uint64_t* next, int64_t num_rows, int64_t num_features, double keep,
                          const int64_t* place, uint8_t* mask, int) {
  Twister twister;
  for (int k = 0; k < kWords; ++k) twister.word[k] = uint32_t(words[k]);
  twister.left = *left - 1;
  const uint64_t threshold = uint64_t(std::ceil(std::ldexp(keep, 53)));
  alignas(64) static thread_local uint64_t pairs[kBatch];
  alignas(64) static thread_local uint8_t kept[kBatch];
  int64_t row = 0, column = 0;
  for (int64_t done = 0, total = num_rows * num_features; done < total;) {
    const int count = total - done < kBatch ? int(total - done) : kBatch;
    twister.give(2 * count, reinterpret_cast<uint32_t*>(pairs));
    compare(pairs, count, threshold, kept);
    for (int at = 0; at < count;) {
      const int64_t of_row = num_features - column, run = of_row < count - at ? of_row : count - at;
      std::memcpy(mask + (place ? place[row] : row) * num_features + column, kept + at, size_t(run));
      at += int(run), column += run;
      if (column == num_features) ++row, column = 0;
    }
    done += count;
  }
  for (int k = 0; k < kWords; ++k) words[k] = twister.word[k];
  *left = twister.left + 1;
  *next = uint64_t(kWords - twister.left);
}

// y = x · scale where the mask is 1, else 0, also of an x that isn't finite as torch has it: NaN.
extern "C" void apply_mask(const S* x, const uint8_t* mask, int64_t count, double scale, S* y, int num_threads) {
  constexpr int64_t kChunk = 16384;
  for_blocks((count + kChunk - 1) / kChunk, num_threads, [&](int64_t block) {
    const int64_t begin = block * kChunk, end = begin + kChunk < count ? begin + kChunk : count;
    for (int64_t k = begin; k < end; ++k) y[k] = x[k] * (S(mask[k]) * S(scale));
  });
}
