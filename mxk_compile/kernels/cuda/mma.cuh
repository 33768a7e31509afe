// mma.sync: products of one warp, A and B from registers. Its fragments are a warp's of WGMMA's, so that either takes what
// the other does. Lane g * 4 + q holds (PTX ISA, "Matrix Fragments for mma.m16n8k16", "... for mma.m16n8k32"):
//   a0, a1, a2, a3   words q of rows g and g + 8, words q + 4 of rows g and g + 8, of A's rows of 32 bytes
//   b0, b1           words q and q + 4 of column g of B, of columns of 32 bytes
//   d0, d1, d2, d3   D[g][2q], [g][2q + 1], [g + 8][2q], [g + 8][2q + 1]
// FP8 products exist as an instruction on compute capability 8.9 and 12; elsewhere the assembler makes fp16 products of
// converted operands, which are exact too.
#pragma once
#include "ptx.cuh"

// d = a . b, E4M3, 32 columns.
__device__ __forceinline__ void product_e4m3(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// d += a . b, bf16, 16 columns.
__device__ __forceinline__ void add_product_bf16(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four matrices of 8 rows of 16 bytes; lanes 8i to 8i + 7 name matrix i's rows, lane g * 4 + q gets word q of row g of each.
__device__ __forceinline__ void load_matrices(u32 (&m)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}
