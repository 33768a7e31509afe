// Packed weights to bf16 pairs, for every 4-bit format of ops/formats: one macro a property, so that a kernel holds one.
//
//   MXK_FORMAT      0 MXFP4 (mxfp4.cuh); 1 INT4 codes 0..15; 2 INT4 two's complement
//   MXK_SCALES      dtype of INT4's scales (enum Dtype); MXFP4's are E8M0 bytes
//   MXK_GROUP_LOG   log2 of the columns that share a scale; 31: the whole row
//   MXK_ZEROS       1: INT4 with a zero point byte beside each scale, else the code 8 means 0
//
// INT4: a nibble becomes the low bits of the bf16 128 + code, from which a subtraction leaves the signed value, exactly.
// Its product with a bf16 scale is rounded once to bf16. With fp16 and fp32 scales, which bf16 does not hold, the product
// is formed in fp32 and rounded once.
#pragma once
#include "call.cuh"
#include "mxfp4.cuh"

#ifndef MXK_FORMAT
#define MXK_FORMAT 0
#endif
#ifndef MXK_SCALES
#define MXK_SCALES 0
#endif
#ifndef MXK_GROUP_LOG
#define MXK_GROUP_LOG 5
#endif
#ifndef MXK_ZEROS
#define MXK_ZEROS 0
#endif

constexpr bool IS_MXFP4 = MXK_FORMAT == 0;
constexpr int SCALE_BYTES = IS_MXFP4 ? 1 : MXK_SCALES == FP32 ? 4 : 2;
constexpr int GROUP_LOG = MXK_GROUP_LOG;

// What a lane needs of one group: as loaded, and made ready.
struct Scale {
  u32 bits;
  u32 zero;
};

// `index` counts groups of the row; a group that is not there makes weights 0.
__device__ __forceinline__ Scale load_scale(const u8* scales, const u8* zeros, int index, bool valid) {
  Scale s{0, 0};
  if (!valid) return s;
  if constexpr (SCALE_BYTES == 1) s.bits = __ldg(scales + index);
  else if constexpr (SCALE_BYTES == 2) s.bits = __ldg(reinterpret_cast<const u16*>(scales) + index);
  else s.bits = __ldg(reinterpret_cast<const u32*>(scales) + index);
  if constexpr (MXK_ZEROS) s.zero = __ldg(zeros + index);
  return s;
}

__device__ __forceinline__ Scale make_ready(Scale s) {
  if constexpr (IS_MXFP4) {
    s.bits = scale_pair(s.bits);
  } else if constexpr (MXK_SCALES == BF16) {
    s.bits *= 0x00010001u;
  } else if constexpr (MXK_SCALES == FP16) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<u16>(s.bits)));
    s.bits = __float_as_uint(value);
  }
  if constexpr (MXK_ZEROS) s.zero = pack_bf16x2(static_cast<float>(s.zero), static_cast<float>(s.zero));
  return s;
}

// Of INT4's unpacking, hidden from the compiler, which would make two instructions of immediates.
struct Constants {
  u32 mask, pattern;
  __device__ __forceinline__ Constants() {
    asm volatile("mov.b32 %0, 0x000F000F;" : "=r"(mask));
    // 128, and the complement of the sign bit
    asm volatile("mov.b32 %0, %1;" : "=r"(pattern) : "n"(MXK_FORMAT == 1 ? 0x43004300u : 0x43084308u));
  }
};

// Weights J and J + 4 of a word of eight, or, NEIGHBOURS, both of byte J.
template <int J, bool NEIGHBOURS>
__device__ __forceinline__ u32 unpack(u32 word, const Scale& scale, const Constants& constants) {
  if constexpr (IS_MXFP4) {
    return scaled(NEIGHBOURS ? expand_byte<J>(word) : expand<J>(word), scale.bits);
  } else {
    const u32 codes = NEIGHBOURS ? __byte_perm(word, word >> 4, J | J << 4 | (4 + J) << 8 | (4 + J) << 12) : word >> (4 * J);
    u32 biased;  // in one instruction: the constants are in registers
    asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(biased) : "r"(codes), "r"(constants.mask), "r"(constants.pattern));
    const u32 value = MXK_ZEROS ? subtract_bf16x2(subtract_bf16x2(biased, 0x43004300u), scale.zero)
                                : subtract_bf16x2(biased, 0x43084308u);  // 136
    if constexpr (MXK_SCALES == BF16) {
      return multiply_bf16x2(value, scale.bits);
    } else {
      const float factor = __uint_as_float(scale.bits);
      return pack_bf16x2(__uint_as_float(value << 16) * factor, __uint_as_float(value & 0xFFFF0000u) * factor);
    }
  }
}
