// AVX-512: activations to digits (tile.h). Included by isa_avx512.cpp alone.
#pragma once
#include <immintrin.h>

#include "exact.h"

namespace {

constexpr float kLost2 = 0x1p-20f;                        // (2^-10)^2: more left behind takes the third digit

inline __m512 power_of_two(int exponent) { return _mm512_castsi512_ps(_mm512_set1_epi32((exponent + 127) << 23)); }

// 2 x 16 int32 of a group -> their low bytes, even values to one plane, odd ones to the other.
inline void store_digits(uint8_t* to, __m512i low, __m512i high) {
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  const __m128i a = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(low), order);
  const __m128i b = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(high), order);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_unpacklo_epi64(a, b));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to + kPlane), _mm_unpackhi_epi64(a, b));
}

// x - (signed low byte of x), as the next digits: (x + 128) >> 8.
inline __m512i next_digit(__m512i x) { return _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8); }

inline uint32_t group_mask(int64_t left) { return left >= kGroup ? 0xffffffffu : left <= 0 ? 0u : (1u << left) - 1; }

// Group g of a vector as two registers of 16; absent values are zero.
inline void load_group(const uint16_t* raw, int64_t g, int64_t n, __m512 (&x)[2]) {
  const __m512i v = _mm512_maskz_loadu_epi16(group_mask(n - g * kGroup), raw + g * kGroup);
  x[0] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(v)), 16));
  x[1] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(v, 1)), 16));
}
inline void load_group(const float* raw, int64_t g, int64_t n, __m512 (&x)[2]) {
  const uint32_t mask = group_mask(n - g * kGroup);
  x[0] = _mm512_maskz_loadu_ps(__mmask16(mask), raw + g * kGroup);
  x[1] = _mm512_maskz_loadu_ps(__mmask16(mask >> 16), raw + g * kGroup + 16);
}

inline __m512i magnitude(__m512 x) { return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)); }

// The group's integers, and the value of one unit: |integer| < 2^(bits + 1) - 2^(bits - 6). 14 bits fit 2 digits;
// 21 fit 3, and 32 products with weight bytes fit int32.
template <int Bits>
inline float to_integers(const __m512 (&x)[2], __m512 (&scaled)[2], __m512i (&integers)[2]) {
  const int most = _mm512_reduce_max_epi32(_mm512_max_epi32(magnitude(x[0]), magnitude(x[1])));
  // A largest value close to the next power of two takes that exponent: it would round beyond the digits.
  int exponent = (most + 0x20000) >> 23;
  if (exponent < kSmallest) exponent = kSmallest;  // a group of zeros, or far below the vector's largest value
  const __m512 up = power_of_two(Bits - (exponent - 127));
  for (int i = 0; i < 2; ++i) scaled[i] = _mm512_mul_ps(x[i], up), integers[i] = _mm512_cvtps_epi32(scaled[i]);
  return from_bits(uint32_t(exponent - Bits) << 23);
}

// Digits of a vector: 2, unless they leave more behind, in the quadratic mean, than 2^-10 of its typical magnitude (the
// square of the mean root, which outliers hardly move), or drown a group of a token (not `wide`); 0 for plain fp32.
template <class T>
int digits_needed(const T* raw, bool wide, int64_t n, int largest) {
  __m512 lost = _mm512_setzero_ps(), roots = _mm512_setzero_ps();
  int values = 0, drowned_in_2 = 0, drowned_in_3 = 0;
  const __m512 normal = power_of_two(127 - largest);
  for (int64_t g = 0; g < groups_of(n); ++g) {
    __m512 x[2], scaled[2];
    __m512i integers[2];
    load_group(raw, g, n, x);
    const __m512 unit = _mm512_mul_ps(_mm512_set1_ps(to_integers<14>(x, scaled, integers)), normal);
    const int most = _mm512_reduce_max_epi32(_mm512_max_epi32(magnitude(x[0]), magnitude(x[1])));
    int in_2 = 0, in_3 = 0;
    for (int i = 0; i < 2; ++i) {
      const __m512i bits = magnitude(x[i]);
      const __mmask16 present = _mm512_test_epi32_mask(bits, bits);  // zeros lose nothing
      const __m512 l = _mm512_mul_ps(_mm512_sub_ps(scaled[i], _mm512_cvtepi32_ps(integers[i])), unit);
      lost = _mm512_fmadd_ps(l, l, lost);
      roots = _mm512_add_ps(roots, _mm512_sqrt_ps(_mm512_mul_ps(_mm512_castsi512_ps(bits), normal)));
      values += __builtin_popcount(present);
      in_2 += __builtin_popcount(_mm512_mask_cmplt_epi32_mask(present, bits, _mm512_set1_epi32(most - kDrownedIn2)));
      in_3 += __builtin_popcount(_mm512_mask_cmplt_epi32_mask(present, bits, _mm512_set1_epi32(most - kDrownedIn3)));
    }
    drowned_in_2 = in_2 > drowned_in_2 ? in_2 : drowned_in_2;
    drowned_in_3 = in_3 > drowned_in_3 ? in_3 : drowned_in_3;
  }
  if (values == 0) return 2;
  if (!wide && drowned_in_3 >= kDrowned) return 0;
  const float count = float(values), root = _mm512_reduce_add_ps(roots) / count;
  const bool loses = _mm512_reduce_add_ps(lost) / count > kLost2 * (root * root) * (root * root);
  return loses || (!wide && drowned_in_2 >= kDrowned) ? 3 : 2;
}

template <int Digits, class T>
void write_chunks(const T* raw, int64_t n, const Coding& coding, uint8_t* to) {
  for (int64_t c = 0; c < chunks_of(n); ++c, to += chunk_bytes(Digits)) {
    __m512i integers[4][2];
    float units[4];
    int32_t corrections[4];
    for (int g = 0; g < 4; ++g) {  // all of it is read before the chunk is written: it may lie in the same place
      __m512 x[2], scaled[2];
      load_group(raw, c * 4 + g, n, x);
      units[g] = to_integers<Digits == 2 ? 14 : 21>(x, scaled, integers[g]) * coding.unit;
      const int sum = _mm512_reduce_add_epi32(_mm512_add_epi32(integers[g][0], integers[g][1]));
      corrections[g] = coding.zero_points ? int32_t(to_bits(float(-sum))) : -coding.offset * sum;
    }
    for (int g = 0; g < 4; ++g)
      for (int d = Digits - 1; d >= 0; --d) {
        store_digits(to + d * kDigit + g * 16, integers[g][0], integers[g][1]);
        integers[g][0] = next_digit(integers[g][0]), integers[g][1] = next_digit(integers[g][1]);
      }
    std::memcpy(to + Digits * kDigit, units, 16);
    std::memcpy(to + Digits * kDigit + 16, corrections, 16);
  }
}

template <class T>
void prepare_values(const T* raw, bool wide, int64_t n, const Coding& coding, uint8_t* memory, Vector* out) {
  __m512i most = _mm512_setzero_si512();
  for (int64_t g = 0; g < groups_of(n); ++g) {
    __m512 x[2];
    load_group(raw, g, n, x);
    most = _mm512_max_epi32(most, _mm512_max_epi32(magnitude(x[0]), magnitude(x[1])));
  }
  int largest = _mm512_reduce_max_epi32(most);
  *out = {raw, wide, 0, memory};
  if (largest != 0 && (largest < (kSmallest << 23) || largest >= (kLargest << 23))) return;
  largest = largest == 0 ? 127 : largest >> 23;
  out->num_digits = digits_needed(raw, wide, n, largest);
  if (out->num_digits == 2) write_chunks<2>(raw, n, coding, memory);
  if (out->num_digits == 3) write_chunks<3>(raw, n, coding, memory);
}

void prepare(const void* raw, bool wide, int64_t n, const Coding& coding, void* memory, Vector* out) {
  uint8_t* to = static_cast<uint8_t*>(memory);
  if (wide)
    prepare_values(static_cast<const float*>(raw), wide, n, coding, to, out);
  else
    prepare_values(static_cast<const uint16_t*>(raw), wide, n, coding, to, out);
}

}  // namespace
