// AVX-512: activations to digits (tile.h). Included by isa_avx512.cpp alone.
#pragma once
#include <immintrin.h>

#include "exact.h"

namespace {

constexpr int kSmallest = 127 - 90, kLargest = 127 + 90;  // biased exponents that the integer path takes
constexpr int kLostPower = -10;                           // what 2 digits may leave behind: 2^-10

inline __m512 power_of_two(int exponent) { return _mm512_castsi512_ps(_mm512_set1_epi32((exponent + 127) << 23)); }

// 2 x 16 int32 -> 32 bytes in the digit order of tile.h.
inline void store_digits(int8_t* to, __m512i low, __m512i high) {
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  _mm_storeu_si128((__m128i*)to, _mm_shuffle_epi8(_mm512_cvtepi32_epi8(low), order));
  _mm_storeu_si128((__m128i*)(to + 16), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(high), order));
}

// x - (signed low byte of x), as the next digits: (x + 128) >> 8.
inline __m512i next_digit(__m512i x) { return _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8); }

// Group g of a vector as two registers of 16; absent values are zero.
inline void load_group(const uint16_t* raw, int64_t g, int64_t n, __m512 (&x)[2]) {
  const int64_t left = n - g * kGroup;
  const __m512i v = _mm512_maskz_loadu_epi16(left >= kGroup ? 0xffffffffu : (1u << left) - 1, raw + g * kGroup);
  x[0] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(v)), 16));
  x[1] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(v, 1)), 16));
}
inline void load_group(const float* raw, int64_t g, int64_t n, __m512 (&x)[2]) {
  const int64_t left = n - g * kGroup;
  const uint32_t mask = left >= kGroup ? 0xffffffffu : (1u << left) - 1;
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

// Whether 2 digits leave more behind, in the quadratic mean, than 2^-10 of the vector's typical magnitude: its
// geometric mean, which outliers hardly move, so that they do not buy the loss of everything else.
template <class T>
bool needs_third_digit(const T* raw, int64_t n, int largest) {
  __m512 lost = _mm512_setzero_ps();
  __m512i exponents = _mm512_setzero_si512(), values = _mm512_setzero_si512();
  const __m512 normal = power_of_two(127 - largest);
  for (int64_t g = 0; g < groups_of(n); ++g) {
    __m512 x[2], scaled[2];
    __m512i integers[2];
    load_group(raw, g, n, x);
    const __m512 unit = _mm512_mul_ps(_mm512_set1_ps(to_integers<14>(x, scaled, integers)), normal);
    for (int i = 0; i < 2; ++i) {
      const __m512 l = _mm512_mul_ps(_mm512_sub_ps(scaled[i], _mm512_cvtepi32_ps(integers[i])), unit);
      lost = _mm512_fmadd_ps(l, l, lost);
      const __m512i exponent = _mm512_srli_epi32(magnitude(x[i]), 23);  // 0: zero or subnormal, not counted
      exponents = _mm512_add_epi32(exponents, exponent);
      values = _mm512_add_epi32(values, _mm512_min_epi32(exponent, _mm512_set1_epi32(1)));
    }
  }
  const int count = _mm512_reduce_add_epi32(values);
  if (count == 0) return false;
  const int power = 2 * (_mm512_reduce_add_epi32(exponents) / count - largest) + 2 * kLostPower;
  return _mm512_reduce_add_ps(lost) > (power < -126 ? 0.0f : float(count) * from_bits(uint32_t(power + 127) << 23));
}

template <int Digits, class T>
void write_records(const T* raw, int64_t n, const Coding& coding, uint8_t* to) {
  for (int64_t g = 0; g < groups_of(n); ++g, to += record_bytes(Digits)) {
    __m512 x[2], scaled[2];
    __m512i integers[2];
    load_group(raw, g, n, x);  // all of it before the record is written: it may lie in the same place
    const float unit = to_integers<Digits == 2 ? 14 : 21>(x, scaled, integers);
    const int sum = _mm512_reduce_add_epi32(_mm512_add_epi32(integers[0], integers[1]));
    GroupMeta meta = {unit * coding.unit, -coding.offset * sum};
    if (coding.zero_points) meta.correction = int32_t(to_bits(float(-sum)));
    for (int d = Digits - 1; d >= 0; --d) {
      store_digits(reinterpret_cast<int8_t*>(to) + d * kGroup, integers[0], integers[1]);
      integers[0] = next_digit(integers[0]), integers[1] = next_digit(integers[1]);
    }
    std::memcpy(to + Digits * kGroup, &meta, sizeof meta);
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
  out->num_digits = needs_third_digit(raw, n, largest) ? 3 : 2;
  if (out->num_digits == 2)
    write_records<2>(raw, n, coding, memory);
  else
    write_records<3>(raw, n, coding, memory);
}

void prepare(const void* raw, bool wide, int64_t n, const Coding& coding, void* memory, Vector* out) {
  uint8_t* to = static_cast<uint8_t*>(memory);
  if (wide)
    prepare_values(static_cast<const float*>(raw), wide, n, coding, to, out);
  else
    prepare_values(static_cast<const uint16_t*>(raw), wide, n, coding, to, out);
}

}  // namespace
