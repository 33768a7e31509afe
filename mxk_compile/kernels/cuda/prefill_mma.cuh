// prefill.cu's products by mma.sync: as prefill_wgmma.cuh, a warp by itself, activations through registers.
#pragma once
#include "mma.cuh"
#include "prefill.cuh"

struct Products : RegisterSums {
  static constexpr int OPERAND_BYTES = 1;
  // Lanes 8i to 8i + 7 name rows of matrix i: chunk i % 2 of a step, of 8 tokens and the next 8.
  static __device__ __forceinline__ u32 operand(u32 address) {
    const u32 lane = threadIdx.x % 32, row = lane % 8 + lane / 16 * 8, chunk = lane / 8 % 2;
    return address + row * PANEL_BYTES + ((chunk ^ row % 8) << 4);
  }
  __device__ __forceinline__ explicit Products(Shared&) {}
  __device__ __forceinline__ void wait(bool, u32) {}
  __device__ __forceinline__ void run(Sums& sum, const Fragment& group, u32 operand, int first, bool) {
#pragma unroll
    for (int i = 0; i < GROUP_STEPS; ++i) {
#pragma unroll
      for (int j = 0; j < TOKENS / 16; ++j) {
        u32 b[4];
        load_matrices(b, (operand ^ (first + i) << 5) + j * (16 * PANEL_BYTES));
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
          add_product_bf16(sum[unit] + 8 * j, group[i][unit], b[0], b[1]);
          add_product_bf16(sum[unit] + 8 * j + 4, group[i][unit], b[2], b[3]);
        }
      }
    }
  }
  __device__ __forceinline__ void drain(u32, bool) {}
  __device__ __forceinline__ void leave(u32 barrier, bool leader) {
    __syncwarp();
    if (leader) barrier_arrive(barrier);
  }
  __device__ __forceinline__ void finish(Sums&, u32, bool) {}
};
