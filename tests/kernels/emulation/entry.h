// Put behind a .cu source: emulate(arguments, grid, block) runs KERNEL.
namespace emulation {

template <class... P>
void call_with(void (*kernel)(P...)) {
  call(kernel, arguments_of_call, std::index_sequence_for<P...>{});
}
inline void enter() { call_with(KERNEL); }

}  // namespace emulation

extern "C" int emulate(void** arguments, unsigned grid_x, unsigned grid_y, unsigned threads) {
  using namespace emulation;
  arguments_of_call = arguments;
  struct sigaction now, segv, bus;
  memset(&now, 0, sizeof now);
  now.sa_handler = on_fault;
  now.sa_flags = SA_NODEFER;
  sigaction(SIGSEGV, &now, &segv), sigaction(SIGBUS, &now, &bus);
  const int outcome = sigsetjmp(escape, 1);
  if (outcome == kFine) {
    gridDim = {grid_x, grid_y, 1}, blockDim = {threads, 1, 1};
    for (unsigned y = 0; y < grid_y; ++y)
      for (unsigned x = 0; x < grid_x; ++x) {
        blockIdx = {x, y, 0};
        run_block(int(threads));
      }
  }
  sigaction(SIGSEGV, &segv, nullptr), sigaction(SIGBUS, &bus, nullptr);
  return outcome;
}
