// D += A B on the matrix units, fragments spread over a warp as PTX's mma.sync has them. With lane = 4 g + t:
//   tf32, 16×8 times 8×8: a[0] (g, t), a[1] (g + 8, t), a[2] (g, t + 4), a[3] (g + 8, t + 4); b[0] (t, g), b[1] (t + 4, g);
//   bf16, 16×16 times 16×8, two neighbouring k a register: a[0] (g, 2t), a[1] (g + 8, 2t), a[2] (g, 2t + 8), a[3] (g + 8, 2t + 8);
//   b[0] (2t, g), b[1] (2t + 8, g);
//   both: d[0] (g, 2t), d[1] (g, 2t + 1), d[2] (g + 8, 2t), d[3] (g + 8, 2t + 1), in fp32.
// Source: NVIDIA, PTX ISA 8.5, section "Warp-level matrix instructions". EMULATED does the same sums with shuffles.

__device__ inline uint32 bits_of(float x) {
  Bits both;
  both.number = x;
  return both.bits;
}
// The 16 high bits, rounded to nearest, ties to even.
__device__ inline uint32 half_of(float x) {
  bf16 stored;
  keep(&stored, x);
  return stored.bits;
}

struct Tf32 {
  static constexpr int kDepth = 8;  // k of one product
  __device__ static uint32 pack(float x, float) {
#ifdef EMULATED
    return (bits_of(x) + 0x1000u) & 0xffffe000u;  // 10 bits of mantissa, ties away from zero
#else
    uint32 rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
    return rounded;
#endif
  }
  // Which k register r of A or B holds, in order of r's half; the second is unused.
  __device__ static int depth(int half, int t) { return t + 4 * half; }
  __device__ static void multiply(float* d, const uint32* a, const uint32* b) {
#ifdef EMULATED
    const int lane = int(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    for (int k = 0; k < 8; ++k) {
      const int half = k / 4, of = k % 4;
      const float low = float_of(__shfl_sync(kAllLanes, a[2 * half], 4 * g + of, 32));
      const float high = float_of(__shfl_sync(kAllLanes, a[2 * half + 1], 4 * g + of, 32));
      const float one = float_of(__shfl_sync(kAllLanes, b[half], 4 * (2 * t) + of, 32));
      const float two = float_of(__shfl_sync(kAllLanes, b[half], 4 * (2 * t + 1) + of, 32));
      d[0] += low * one, d[1] += low * two, d[2] += high * one, d[3] += high * two;
    }
#else
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
  }
};

struct Bf16 {
  static constexpr int kDepth = 16;
  __device__ static uint32 pack(float first, float second) { return half_of(first) | half_of(second) << 16; }
  __device__ static int depth(int half, int t) { return 2 * t + 8 * half; }
  __device__ static void multiply(float* d, const uint32* a, const uint32* b) {
#ifdef EMULATED
    const int lane = int(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    for (int k = 0; k < 16; ++k) {
      const int half = k / 8, of = k % 8 / 2, shift = k % 2 ? 0 : 16;
      auto number = [&](uint32 pair) { return float_of(pair << shift & 0xffff0000u); };
      const float low = number(__shfl_sync(kAllLanes, a[2 * half], 4 * g + of, 32));
      const float high = number(__shfl_sync(kAllLanes, a[2 * half + 1], 4 * g + of, 32));
      const float one = number(__shfl_sync(kAllLanes, b[half], 4 * (2 * t) + of, 32));
      const float two = number(__shfl_sync(kAllLanes, b[half], 4 * (2 * t + 1) + of, 32));
      d[0] += low * one, d[1] += low * two, d[2] += high * one, d[3] += high * two;
    }
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
  }
};
