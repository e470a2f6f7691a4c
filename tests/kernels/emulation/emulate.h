// A CUDA kernel on the host: a lane is a fiber, a warp's fibers meet at each exchange. Put before a .cu source; KERNEL names the kernel.
//
// What the kernels use is supplied: thread and block indices, shared memory, barriers, shuffles over a full mask, atomic sums. A lane that ends, or takes another exchange, while
// its warp waits at one is an error, as it is undefined on the device. A touch of memory that isn't mapped ends the call with an error, so
// buffers between guard pages show every access outside them.
#pragma once
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <cmath>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __shared__ static  // of the block that runs; one does at a time
#define EMULATED

struct Index3 {
  unsigned x, y, z;
};
static Index3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

constexpr int kWarp = 32, kMaxThreads = 256, kBarrier = -1;
constexpr size_t kStackBytes = 128 << 10;
struct Lane {
  ucontext_t context;
  char* stack;
  bool is_done, is_waiting;
  int exchanges;
  int line;  // which exchange: its width and kind; or the barrier
};
static Lane lanes[kMaxThreads];
static ucontext_t scheduler;
static int current;
static uint64_t slots[2][kMaxThreads];
static sigjmp_buf escape;
enum Outcome { kFine, kFault, kDiverged };

inline void resume(int thread) {
  current = thread;
  threadIdx.x = thread;
  swapcontext(&scheduler, &lanes[thread].context);
}
inline void wait(int line) {
  Lane& me = lanes[current];
  me.is_waiting = true, me.line = line;
  swapcontext(&me.context, &scheduler);
}

// Publishes a value, waits for the whole warp, returns the value of a lane.
template <class T>
T exchange(T value, int from, int kind) {
  const int me = current, parity = lanes[me].exchanges++ & 1;
  slots[parity][me] = 0;
  memcpy(&slots[parity][me], &value, sizeof value);
  wait(kind);
  T found;
  memcpy(&found, &slots[parity][me / kWarp * kWarp + from], sizeof found);
  return found;
}

template <class... P, size_t... At>
void call(void (*kernel)(P...), void** arguments, std::index_sequence<At...>) {
  kernel(*static_cast<P*>(arguments[At])...);
}
static void** arguments_of_call;
inline void enter();
inline void lane_main() {
  enter();
  lanes[current].is_done = true;
  swapcontext(&lanes[current].context, &scheduler);
}

// Runs the lanes of a warp up to their next exchange, barrier or end; false once all have ended.
inline bool advance(int warp) {
  int num_waiting = 0, line = 0;
  for (int thread = warp * kWarp; thread < (warp + 1) * kWarp; ++thread) {
    if (lanes[thread].is_done) continue;
    lanes[thread].is_waiting = false;
    resume(thread);
    if (!lanes[thread].is_waiting) continue;
    if (num_waiting && line != lanes[thread].line) siglongjmp(escape, kDiverged);
    line = lanes[thread].line;
    ++num_waiting;
  }
  if (num_waiting != 0 && num_waiting != kWarp) siglongjmp(escape, kDiverged);
  return num_waiting != 0;
}

// Runs a block: warps in turns, those at the barrier wait for all others.
inline void run_block(int num_threads) {
  for (int thread = 0; thread < num_threads; ++thread) {
    Lane& l = lanes[thread];
    if (!l.stack) l.stack = static_cast<char*>(malloc(kStackBytes));
    getcontext(&l.context);
    l.context.uc_stack.ss_sp = l.stack, l.context.uc_stack.ss_size = kStackBytes, l.context.uc_link = nullptr;
    l.is_done = false, l.exchanges = 0;
    makecontext(&l.context, lane_main, 0);
  }
  const int num_warps = num_threads / kWarp;
  bool is_over[kMaxThreads / kWarp] = {}, is_held[kMaxThreads / kWarp] = {};
  for (;;) {
    int num_over = 0, num_held = 0;
    for (int warp = 0; warp < num_warps; ++warp) {
      while (!is_over[warp] && !is_held[warp]) {
        is_over[warp] = !advance(warp);
        is_held[warp] = !is_over[warp] && lanes[warp * kWarp].line == kBarrier;
      }
      num_over += is_over[warp], num_held += is_held[warp];
    }
    if (num_held == 0) return;
    if (num_over) siglongjmp(escape, kDiverged);  // some ended without the barrier that others wait at
    memset(is_held, 0, sizeof is_held);
  }
}

inline void on_fault(int) { siglongjmp(escape, kFault); }

}  // namespace emulation

inline void __syncthreads() { emulation::wait(emulation::kBarrier); }
inline int __ffsll(long long word) { return __builtin_ffsll(word); }
template <class T>
inline T atomicAdd(T* to, T more) {
  const T before = *to;
  *to += more;
  return before;
}
template <class T>
inline T __shfl_xor_sync(unsigned, T value, int mask, int width) {
  const int lane = int(threadIdx.x) % 32;
  return emulation::exchange(value, (lane ^ mask) / width == lane / width ? lane ^ mask : lane, width * 2);
}
template <class T>
inline T __shfl_sync(unsigned, T value, int from, int width) {
  const int lane = int(threadIdx.x) % 32;
  return emulation::exchange(value, lane / width * width + from % width, width * 2 + 1);
}
