// prefill.cu's products by WGMMA: sums in registers, fragments read while the next ones are made.
#pragma once
#include "prefill.cuh"
#include "wgmma.cuh"

// Of one consumer thread. A leader makes one of its warpgroup's ARRIVALS at the barrier of a stage, where all have read it.
struct Products {
  static constexpr int ARRIVALS = 4;
  struct Shared {};
  static __device__ __forceinline__ bool leads(int lane, int) { return lane == 0; }

  // A block of activations: K-major, 128-byte swizzle, 8 rows = 1024 bytes.
  static __device__ __forceinline__ u64 operand(u32 address) {
    return (static_cast<u64>(1) << 62) | (static_cast<u64>(1024 >> 4) << 32) | (static_cast<u64>(1) << 16) |
           ((address & 0x3FFFF) >> 4);
  }
  static __device__ __forceinline__ void prepare(Shared&) {}
  __device__ __forceinline__ explicit Products(Shared&) {}
  __device__ __forceinline__ void begin(Sums& sum) {
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
#pragma unroll
      for (int i = 0; i < TOKENS / 2; ++i) sum[unit][i] = 0.0f;
    }
  }
  // For the fragments written next. A leader in the second wait of a stage leaves the stage before, `used`, if there is one.
  __device__ __forceinline__ void wait(bool leaves, u32 used) {
    wgmma_wait<1>();  // of the products that read them, all but the group before
    if (leaves && used != ~0u) barrier_arrive(used);
  }
  // `first`: the first step's number in its block.
  __device__ __forceinline__ void run(Sums& sum, const Fragment& group, u64 operand, int first, bool) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < GROUP_STEPS; ++i) {
#pragma unroll
      for (int unit = 0; unit < 2; ++unit)
        Wgmma<TOKENS>::run(sum[unit], group[i][unit], operand + 2 * (first + i));
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void leave(u32, bool) {}  // a stage: the tensor cores still read it
  __device__ __forceinline__ void finish(Sums&, u32 used, bool leader) {
    wgmma_wait<0>();
    if (leader) barrier_arrive(used);
  }
  __device__ __forceinline__ void end() {}
};
