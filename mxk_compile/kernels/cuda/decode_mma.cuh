// The decode kernel's products by mma.sync: as decode_wgmma.cuh, a warp by itself, B through registers.
#pragma once
#include "decode_digits.cuh"
#include "mma.cuh"

constexpr u32 DIGITS_STEP = 256 * NT;
__device__ __forceinline__ u32 digits_operand(u32 address) { return address + 4 * (threadIdx.x & 31); }
__device__ __forceinline__ u32 uniform_digits(u32 digits) { return digits; }
__device__ __forceinline__ void begin_products() {}
__device__ __forceinline__ void end_products() {}
__device__ __forceinline__ void wait_for_products() {}

// Core matrices of 8 columns of 16 bytes are contiguous, so lane 4g + q finds b0 and b1 at its own place in two of them.
template <int N>
struct Product {
  static __device__ __forceinline__ void run(float (&d)[N][4], const u32 (&a)[4], u32 b) {
#pragma unroll
    for (int n = 0; n < N; ++n)
      product_e4m3(d[n], a, load_shared_4(b + 256 * n), load_shared_4(b + 256 * n + 128));
  }
};
