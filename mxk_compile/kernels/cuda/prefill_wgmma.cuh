// prefill.cu's products by WGMMA: sums in registers, fragments read while the next ones are made.
#pragma once
#include "prefill.cuh"
#include "wgmma.cuh"

struct Products : RegisterSums {
  // A panel of activations: K-major, 128-byte swizzle, 8 rows = 1024 bytes; this is the lower half of its descriptor.
  static constexpr int OPERAND_BYTES = 16;
  static __device__ __forceinline__ u32 operand(u32 address) {
    return __shfl_sync(~0u, 1 << 16 | (address & 0x3FFFF) >> 4, 0);
  }
  __device__ __forceinline__ explicit Products(Shared&) {}
  // For the fragments written next. A leader in the second wait of a stage leaves the stage before, `used`, if there is one.
  __device__ __forceinline__ void wait(bool leaves, u32 used) {
    wgmma_wait<1>();  // of the products that read them, all but the group before
    if (leaves && used != ~0u) barrier_arrive(used);
  }
  // `first`: the first step's number in its panel.
  __device__ __forceinline__ void run(Sums& sum, const Fragment& group, u32 operand, int first, bool) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < GROUP_STEPS; ++i) {
#pragma unroll
      for (int unit = 0; unit < UNITS; ++unit)
        Wgmma<TOKENS>::run(sum[unit], group[i][unit], operand + 2 * (first + i));
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void drain(u32 used, bool leader) {
    wgmma_wait<0>();
    if (leader && used != ~0u) barrier_arrive(used);
  }
  __device__ __forceinline__ void leave(u32, bool) {}  // a stage: the tensor cores still read it
  __device__ __forceinline__ void finish(Sums&, u32 used, bool leader) { drain(used, leader); }
};
