// Work over blocks of rows on torch's own thread pool.
//
// GOMP_parallel of the OpenMP runtime that torch has loaded is called by its address: no second runtime can come in, whatever its file
// is called and whichever compiler built this. (LLVM's and Intel's runtimes have that entry too.) Without one, the caller works alone.
#pragma once
#include <atomic>
#include <cstdint>

typedef void (*ParallelRegion)(void (*)(void*), void*, unsigned, unsigned);
static ParallelRegion parallel_region = nullptr;

extern "C" void use_parallel_region(ParallelRegion region) { parallel_region = region; }

// Calls body(block) once for each block; which thread takes which is left open, so a block may write only what it owns.
template <class Body>
void for_blocks(int64_t num_blocks, int num_threads, Body body) {
  struct Job {
    std::atomic<int64_t> next;
    int64_t num_blocks;
    Body* body;
  } job{{0}, num_blocks, &body};
  auto work = [](void* given) {
    Job* job = static_cast<Job*>(given);
    for (int64_t block; (block = job->next.fetch_add(1, std::memory_order_relaxed)) < job->num_blocks;) (*job->body)(block);
  };
  if (num_threads > num_blocks) num_threads = int(num_blocks);
  if (num_threads <= 1 || parallel_region == nullptr)
    work(&job);
  else
    parallel_region(work, &job, unsigned(num_threads), 0);
}
