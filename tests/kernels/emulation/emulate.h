// A CUDA kernel on the host: a lane is a fiber, a warp's fibers meet at each exchange. Put before a .cu source; KERNEL names the kernel.
//
// What the kernels use is supplied: thread and block indices, shuffles over a full mask. A lane that ends, or takes another exchange, while
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

struct Index3 {
  unsigned x, y, z;
};
static Index3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 128 << 10;
struct Lane {
  ucontext_t context;
  char* stack;
  bool is_done, is_waiting;
  int exchanges;
  int line;  // which exchange: its width and kind
};
static Lane lanes[kWarp];
static ucontext_t scheduler;
static int current;
static unsigned first_thread;
static uint64_t slots[2][kWarp];
static sigjmp_buf escape;
enum Outcome { kFine, kFault, kDiverged };

inline void resume(int lane) {
  current = lane;
  threadIdx.x = first_thread + lane;
  swapcontext(&scheduler, &lanes[lane].context);
}

// Publishes a value, waits for the whole warp, returns the value of a lane.
template <class T>
T exchange(T value, int from, int kind) {
  const int parity = lanes[current].exchanges++ & 1, me = current;
  slots[parity][me] = 0;
  memcpy(&slots[parity][me], &value, sizeof value);
  lanes[me].is_waiting = true, lanes[me].line = kind;
  swapcontext(&lanes[me].context, &scheduler);
  T found;
  memcpy(&found, &slots[parity][from], sizeof found);
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

inline void run_warp(unsigned thread) {
  first_thread = thread;
  for (int lane = 0; lane < kWarp; ++lane) {
    Lane& l = lanes[lane];
    if (!l.stack) l.stack = static_cast<char*>(malloc(kStackBytes));
    getcontext(&l.context);
    l.context.uc_stack.ss_sp = l.stack, l.context.uc_stack.ss_size = kStackBytes, l.context.uc_link = nullptr;
    l.is_done = false, l.exchanges = 0;
    makecontext(&l.context, lane_main, 0);
  }
  for (;;) {
    int num_waiting = 0, kind = 0;
    for (int lane = 0; lane < kWarp; ++lane) {
      if (lanes[lane].is_done) continue;
      lanes[lane].is_waiting = false;
      resume(lane);
      if (!lanes[lane].is_waiting) continue;
      if (num_waiting && kind != lanes[lane].line) siglongjmp(escape, kDiverged);
      kind = lanes[lane].line;
      ++num_waiting;
    }
    if (num_waiting == 0) return;
    if (num_waiting != kWarp) siglongjmp(escape, kDiverged);
  }
}

inline void on_fault(int) { siglongjmp(escape, kFault); }

}  // namespace emulation

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
