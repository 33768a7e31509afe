// MXFP4 as in ops/formats/mxfp4.py, to bf16: exact wherever bf16 holds the product, and 2^128 and more is infinity.
#pragma once
#include "ptx.cuh"

// Nibbles j and j + 4 of a word as two bf16 of value * 2^-126 (E2M1's exponent and mantissa at the low end of bf16's).
template <int J>
__device__ __forceinline__ u32 expand(u32 word) {
  const u32 magnitude = J == 0 ? word << 6 : J == 1 ? word << 2 : J == 2 ? word >> 2 : word >> 6;
  const u32 sign = J == 3 ? word : word << (12 - 4 * J);
  return (magnitude & 0x01C001C0u) | (sign & 0x80008000u);
}

#ifndef MXK_SCALES_SMALL
#define MXK_SCALES_SMALL 0  // 1: no scale byte is above 128, which was checked once a weight
#endif
constexpr u32 TWO_126 = 0x7E807E80u;  // 2^126 twice: undoes expand's factor, exactly

// E8M0 byte as bf16 twice. 2^-127 is a subnormal; 255 is NaN. Small ones take 2^126 with them: 2^(byte - 1).
__device__ __forceinline__ u32 scale_pair(u32 byte) {
  if constexpr (MXK_SCALES_SMALL) return (byte + 126) * 0x00800080u;
  const u32 bits = byte == 0 ? 0x0040u : byte == 255 ? 0x7FC0u : byte << 7;
  return bits | bits << 16;
}

// Both nibbles of byte I of a word, so that bf16s are the code's neighbours, as `expand`.
template <int I>
__device__ __forceinline__ u32 expand_byte(u32 word) {
  const u32 high = __byte_perm(word << 4, word, I | I << 4 | (4 + I) << 8 | (4 + I) << 12);  // codes in bits 12 to 15
  return (high >> 6 & 0x01C001C0u) | (high & 0x80008000u);
}

__device__ __forceinline__ u32 scaled(u32 expanded, u32 scale) {
  if constexpr (MXK_SCALES_SMALL) return multiply_bf16x2(expanded, scale);
  return multiply_bf16x2(multiply_bf16x2(expanded, TWO_126), scale);
}

template <int J>
__device__ __forceinline__ u32 weights(u32 word, u32 scale) {
  return scaled(expand<J>(word), scale);
}
