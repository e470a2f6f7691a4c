// Rows and heads, a group of lanes each, whose edges come in tiles of GROUP.

// The rows and heads that groups own; those past the end take part in exchanges with no edges.
struct Item {
  int64 row, head, begin, length, longest;
  bool is_real;
  __device__ Item(int64 number, int64 num_rows, int64 num_heads, const int64* indptr) : is_real(number < num_rows * num_heads) {
    row = is_real ? number / num_heads : 0, head = is_real ? number % num_heads : 0;
    begin = is_real ? indptr[row] : 0;
    length = is_real ? indptr[row + 1] - begin : 0;
    longest = warp_max(length);
  }
  __device__ int count(int64 first) const { return within(length - first); }  // edges of the tile that begins at ``first``
  __device__ int most(int64 first) const { return within(longest - first); }   // the same of the warp's longest row

 private:
  __device__ static int within(int64 left) { return left <= 0 ? 0 : left < GROUP ? int(left) : GROUP; }
};

__device__ inline A from_lane(A x, int lane) { return __shfl_sync(kAllLanes, x, lane, GROUP); }
__device__ inline int64 from_lane(int64 x, int lane) { return __shfl_sync(kAllLanes, x, lane, GROUP); }
