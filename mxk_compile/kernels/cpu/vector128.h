// The few 128-bit operations that isa_portable.cpp needs, for x86 with SSSE3 and for NEON, with and without its byte dot
// product (a dot product instruction is assembly: the baseline's headers hide it).
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__SSSE3__)
#include <tmmintrin.h>
#define MXK_VECTOR128 1

namespace {

using Bytes = __m128i;
using Ints = __m128i;
using Floats = __m128;

inline Bytes load_bytes(const void* at) { return _mm_loadu_si128(static_cast<const __m128i*>(at)); }
inline Bytes look_up(Bytes table, Bytes index) { return _mm_shuffle_epi8(table, index); }
inline Bytes low_nibbles(Bytes v) { return _mm_and_si128(v, _mm_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes v) { return low_nibbles(_mm_srli_epi16(v, 4)); }
inline Ints no_ints() { return _mm_setzero_si128(); }
inline Ints add(Ints a, Ints b) { return _mm_add_epi32(a, b); }
inline Ints times_256(Ints v) { return _mm_slli_epi32(v, 8); }
// Sums of 4 neighbours of codes (unsigned, at most 24) times digits: the 16-bit sums of 4 products fit, 4 * 24 * 128.
template <bool>
inline Ints dot(Bytes low, Bytes high, Bytes even, Bytes odd) {
  const __m128i pairs = _mm_add_epi16(_mm_maddubs_epi16(low, even), _mm_maddubs_epi16(high, odd));
  return _mm_madd_epi16(pairs, _mm_set1_epi16(1));
}
inline Ints first_lane(int32_t value) { return _mm_cvtsi32_si128(value); }
inline Floats to_floats(Ints v) { return _mm_cvtepi32_ps(v); }
inline Floats as_floats(Ints v) { return _mm_castsi128_ps(v); }
inline Floats no_floats() { return _mm_setzero_ps(); }
inline Floats load_floats(const void* at) { return _mm_loadu_ps(static_cast<const float*>(at)); }
inline void store(float* at, Floats v) { _mm_storeu_ps(at, v); }
inline Floats add(Floats a, Floats b) { return _mm_add_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm_mul_ps(a, b); }
template <int Lane>
inline Floats add_times_lane(Floats sum, Floats a, Floats b) {  // sum + a * b[Lane]
  return _mm_add_ps(sum, _mm_mul_ps(a, _mm_shuffle_ps(b, b, Lane * 0x55)));
}
inline float total(Floats v) {
  v = _mm_add_ps(v, _mm_movehl_ps(v, v));
  return _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps(v, v, 1)));
}
inline void fetch(const uint8_t* at) { _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0); }
inline bool has_vector128() { return __builtin_cpu_supports("ssse3"); }
inline bool has_dot() { return false; }

}  // namespace

#elif defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>
#define MXK_VECTOR128 1
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__ARM_FEATURE_DOTPROD)
#define MXK_ALLOW_DOT ""
#else
#define MXK_ALLOW_DOT ".arch armv8.2-a+dotprod\n\t"  // for the assembler
#endif

namespace {

using Bytes = uint8x16_t;
using Ints = int32x4_t;
using Floats = float32x4_t;

inline Bytes load_bytes(const void* at) { return vld1q_u8(static_cast<const uint8_t*>(at)); }
inline Bytes look_up(Bytes table, Bytes index) { return vqtbl1q_u8(table, index); }
inline Bytes low_nibbles(Bytes v) { return vandq_u8(v, vdupq_n_u8(15)); }
inline Bytes high_nibbles(Bytes v) { return vshrq_n_u8(v, 4); }
inline Ints no_ints() { return vdupq_n_s32(0); }
inline Ints add(Ints a, Ints b) { return vaddq_s32(a, b); }
inline Ints times_256(Ints v) { return vshlq_n_s32(v, 8); }
template <bool Dot>
inline Ints dot(Bytes low, Bytes high, Bytes even, Bytes odd) {
  const int8x16_t a = vreinterpretq_s8_u8(low), b = vreinterpretq_s8_u8(high);
  const int8x16_t c = vreinterpretq_s8_u8(even), d = vreinterpretq_s8_u8(odd);
  if (Dot) {
    Ints sum = no_ints();
    asm(MXK_ALLOW_DOT "sdot %0.4s, %1.16b, %3.16b\n\tsdot %0.4s, %2.16b, %4.16b"
        : "+&w"(sum)
        : "w"(a), "w"(b), "w"(c), "w"(d));
    return sum;
  }
  // Codes are at most 24: the 16-bit sums of 4 products fit.
  int16x8_t pairs = vmlal_s8(vmull_s8(vget_low_s8(a), vget_low_s8(c)), vget_low_s8(b), vget_low_s8(d));
  pairs = vmlal_high_s8(vmlal_high_s8(pairs, a, c), b, d);
  return vpaddlq_s16(pairs);
}
inline Ints first_lane(int32_t value) { return vsetq_lane_s32(value, no_ints(), 0); }
inline Floats to_floats(Ints v) { return vcvtq_f32_s32(v); }
inline Floats as_floats(Ints v) { return vreinterpretq_f32_s32(v); }
inline Floats no_floats() { return vdupq_n_f32(0); }
inline Floats load_floats(const void* at) { return vreinterpretq_f32_u8(load_bytes(at)); }
inline void store(float* at, Floats v) { vst1q_f32(at, v); }
inline Floats add(Floats a, Floats b) { return vaddq_f32(a, b); }
inline Floats multiply(Floats a, Floats b) { return vmulq_f32(a, b); }
template <int Lane>
inline Floats add_times_lane(Floats sum, Floats a, Floats b) {
  return vfmaq_laneq_f32(sum, a, b, Lane);
}
inline float total(Floats v) { return vaddvq_f32(v); }
inline void fetch(const uint8_t* at) { __builtin_prefetch(at); }
inline bool has_vector128() { return true; }
inline bool has_dot() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP
#else
  return false;
#endif
}

}  // namespace
#endif
