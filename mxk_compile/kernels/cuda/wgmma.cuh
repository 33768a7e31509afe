// wgmma.mma_async m64nNk16, bf16 x bf16 -> fp32: A (64 x 16) from registers, B (N x 16) from shared memory.
//
// One specialisation an N, since the instruction names each accumulator register. Fragment of lane (g = lane / 4,
// q = lane % 4) of warp w: a0, a1, a2, a3 = A[16w+g][2q..], A[16w+g+8][2q..], A[16w+g][2q+8..], A[16w+g+8][2q+8..];
// d[4j..4j+3] = D[16w+g][8j+2q], [.][8j+2q+1], D[16w+g+8][8j+2q], [.][8j+2q+1] (PTX ISA, "Register Fragments for
// wgmma.mma_async.m64nNk16").
#pragma once

// Descriptors of B have the same upper half: 128-byte swizzle, and 1024 bytes from 8 rows to the next.
__device__ __forceinline__ u64 b_descriptor(u32 lower) {
  u64 d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(lower), "n"(1 << 30 | 1024 >> 4));
  return d;
}

template <int N>
struct Wgmma;

// Operands: 0..N/2-1 the accumulators, then four of A, then B's descriptor.
#define MXK_D8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define MXK_WGMMA(N, NAMES, A_AND_B, ...)                                                                       \
  template <>                                                                                                  \
  struct Wgmma<N> {                                                                                            \
    static __device__ __forceinline__ void run(float (&d)[N / 2], const u32 (&a)[4], u32 b) {                  \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NAMES "}, " A_AND_B ", 1, 1, 1, 0;\n" \
                   : __VA_ARGS__                                                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_descriptor(b)));                        \
    }                                                                                                          \
  };
#define MXK_N8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define MXK_R8 MXK_D8(0)
#define MXK_N16 MXK_N8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MXK_R16 MXK_R8, MXK_D8(8)
#define MXK_N24 MXK_N16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define MXK_R24 MXK_R16, MXK_D8(16)
#define MXK_N32 MXK_N24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define MXK_R32 MXK_R24, MXK_D8(24)
#define MXK_N40 MXK_N32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define MXK_R40 MXK_R32, MXK_D8(32)
#define MXK_N48 MXK_N40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define MXK_R48 MXK_R40, MXK_D8(40)
#define MXK_N56 MXK_N48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define MXK_R56 MXK_R48, MXK_D8(48)
#define MXK_N64 MXK_N56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define MXK_R64 MXK_R56, MXK_D8(56)
#define MXK_N72 MXK_N64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define MXK_R72 MXK_R64, MXK_D8(64)
#define MXK_N80 MXK_N72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define MXK_R80 MXK_R72, MXK_D8(72)
#define MXK_N88 MXK_N80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define MXK_R88 MXK_R80, MXK_D8(80)

MXK_WGMMA(16, MXK_N8, "{%8, %9, %10, %11}, %12", MXK_R8)
MXK_WGMMA(32, MXK_N16, "{%16, %17, %18, %19}, %20", MXK_R16)
MXK_WGMMA(48, MXK_N24, "{%24, %25, %26, %27}, %28", MXK_R24)
MXK_WGMMA(64, MXK_N32, "{%32, %33, %34, %35}, %36", MXK_R32)
MXK_WGMMA(80, MXK_N40, "{%40, %41, %42, %43}, %44", MXK_R40)
MXK_WGMMA(96, MXK_N48, "{%48, %49, %50, %51}, %52", MXK_R48)
MXK_WGMMA(112, MXK_N56, "{%56, %57, %58, %59}, %60", MXK_R56)
MXK_WGMMA(128, MXK_N64, "{%64, %65, %66, %67}, %68", MXK_R64)
MXK_WGMMA(144, MXK_N72, "{%72, %73, %74, %75}, %76", MXK_R72)
MXK_WGMMA(160, MXK_N80, "{%80, %81, %82, %83}, %84", MXK_R80)
MXK_WGMMA(176, MXK_N88, "{%88, %89, %90, %91}, %92", MXK_R88)
