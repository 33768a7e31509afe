// The decode kernel's products by WGMMA: A from registers, B, the digits, from shared memory, four warps an instruction.
#pragma once
#include "decode_digits.cuh"

// B in shared memory without swizzle: core matrices of 8 x 16 bytes, 128 bytes apart along K, 256 along N.
// The upper half of its descriptor is the same for all.
__device__ __forceinline__ u64 digits_descriptor(u32 lower) {
  u64 d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(lower), "n"(256 >> 4));
  return d;
}

// Digits of a group of 32 columns as operand B: what stands for them in a register, and how far the next group's are.
constexpr u32 DIGITS_STEP = 16 * NT;  // descriptors count in 16 bytes
__device__ __forceinline__ u32 digits_operand(u32 address) { return address >> 4 | (128 >> 4) << 16; }
// Descriptors are reckoned on the uniform pipe, from a value that the compiler sees to be the warp's.
__device__ __forceinline__ u32 uniform_digits(u32 digits) { return __shfl_sync(~0u, digits, 0); }
__device__ __forceinline__ void begin_products() { wgmma_fence(); }
__device__ __forceinline__ void end_products() { wgmma_commit(); }
__device__ __forceinline__ void wait_for_products() { wgmma_wait<0>(); }

// wgmma.mma_async m64n8k32 (n16, n24, n32), E4M3 x E4M3 -> fp32, without adding to what `d` holds. Lane (g = lane / 4,
// q = lane % 4) of warp w: a0, a1 = A[16w+g][4q..4q+3], A[16w+g+8][4q..]; a2, a3 = the same 16 columns on; d[n][0], d[n][1] =
// D[16w+g][8n+2q], [8n+2q+1]; d[n][2], d[n][3] = those of row 16w+g+8 (PTX ISA, "Matrix Fragments for wgmma.mma_async.m64nNk32").
template <int N>
struct Product;
template <>
struct Product<1> {
  static __device__ __forceinline__ void run(float (&d)[1][4], const u32 (&a)[4], u32 b) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, add, 1, 1;\n}"
        : "=f"(d[0][0]), "=f"(d[0][1]), "=f"(d[0][2]), "=f"(d[0][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(digits_descriptor(b)));
  }
};
template <>
struct Product<2> {
  static __device__ __forceinline__ void run(float (&d)[2][4], const u32 (&a)[4], u32 b) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, add, "
        "1, 1;\n}"
        : "=f"(d[0][0]), "=f"(d[0][1]), "=f"(d[0][2]), "=f"(d[0][3]), "=f"(d[1][0]), "=f"(d[1][1]), "=f"(d[1][2]),
          "=f"(d[1][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(digits_descriptor(b)));
  }
};
template <>
struct Product<3> {
  static __device__ __forceinline__ void run(float (&d)[3][4], const u32 (&a)[4], u32 b) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n24k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, "
        "%14, %15}, %16, add, 1, 1;\n}"
        : "=f"(d[0][0]), "=f"(d[0][1]), "=f"(d[0][2]), "=f"(d[0][3]), "=f"(d[1][0]), "=f"(d[1][1]), "=f"(d[1][2]),
          "=f"(d[1][3]), "=f"(d[2][0]), "=f"(d[2][1]), "=f"(d[2][2]), "=f"(d[2][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(digits_descriptor(b)));
  }
};
template <>
struct Product<4> {
  static __device__ __forceinline__ void run(float (&d)[4][4], const u32 (&a)[4], u32 b) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, "
        "%15}, {%16, %17, %18, %19}, %20, add, 1, 1;\n}"
        : "=f"(d[0][0]), "=f"(d[0][1]), "=f"(d[0][2]), "=f"(d[0][3]), "=f"(d[1][0]), "=f"(d[1][1]), "=f"(d[1][2]),
          "=f"(d[1][3]), "=f"(d[2][0]), "=f"(d[2][1]), "=f"(d[2][2]), "=f"(d[2][3]), "=f"(d[3][0]), "=f"(d[3][1]),
          "=f"(d[3][2]), "=f"(d[3][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(digits_descriptor(b)));
  }
};
