// Activations to digits (tile.h) in plain C++, for the instruction sets without a version of their own.
#pragma once
#include "exact.h"

namespace {

// What 2 digits may leave behind, as in avx512_prepare.h: (2^-10)^2 of the typical magnitude.
constexpr float kMayLose2 = 0x1p-20f;

// Group g as fp32; absent values are zero.
template <class T>
inline void read_group(const T* raw, int64_t g, int64_t n, float (&x)[kGroup]) {
  for (int i = 0; i < kGroup; ++i) x[i] = g * kGroup + i < n ? to_float(raw[g * kGroup + i]) : 0.0f;
}

// Integers of a group, |integer| < 2^(bits + 1) - 2^(bits - 6), and the value of one unit.
template <int Bits>
inline float to_integers(const float (&x)[kGroup], float (&scaled)[kGroup], int32_t (&integers)[kGroup]) {
  uint32_t most = 0;
  for (int i = 0; i < kGroup; ++i) {
    const uint32_t size = to_bits(x[i]) & 0x7fffffffu;
    most = size > most ? size : most;
  }
  int exponent = int((most + 0x20000) >> 23);  // rounds up what would round beyond the digits
  exponent = exponent < kSmallest ? kSmallest : exponent;
  const float up = from_bits(uint32_t(Bits - (exponent - 127) + 127) << 23);
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  for (int i = 0; i < kGroup; ++i) {
    scaled[i] = x[i] * up;
    integers[i] = int32_t(to_bits(scaled[i] + kRound) - to_bits(kRound));
  }
  return from_bits(uint32_t(exponent - Bits) << 23);
}

// As in avx512_prepare.h.
template <class T>
int digits_needed(const T* raw, bool wide, int64_t n, int largest) {
  const float normal = from_bits(uint32_t(127 - largest + 127) << 23);
  double lost = 0, roots = 0;
  int64_t count = 0;
  int drowned_in_2 = 0, drowned_in_3 = 0;
  for (int64_t g = 0; g < groups_of(n); ++g) {
    float x[kGroup], scaled[kGroup], lost_here = 0, roots_here = 0;
    int32_t integers[kGroup], most = 0;
    read_group(raw, g, n, x);
    const float unit = to_integers<14>(x, scaled, integers) * normal;
    for (int i = 0; i < kGroup; ++i) {
      const int32_t bits = int32_t(to_bits(x[i]) & 0x7fffffffu);
      most = bits > most ? bits : most;
    }
    int in_2 = 0, in_3 = 0;
    for (int i = 0; i < kGroup; ++i) {
      const float l = (scaled[i] - float(integers[i])) * unit, size = x[i] < 0 ? -x[i] : x[i];
      const int32_t bits = int32_t(to_bits(x[i]) & 0x7fffffffu);
      lost_here += l * l, roots_here += __builtin_sqrtf(size * normal), count += bits != 0;
      in_2 += bits != 0 && bits < most - kDrownedIn2, in_3 += bits != 0 && bits < most - kDrownedIn3;
    }
    lost += lost_here, roots += roots_here;
    drowned_in_2 = in_2 > drowned_in_2 ? in_2 : drowned_in_2;
    drowned_in_3 = in_3 > drowned_in_3 ? in_3 : drowned_in_3;
  }
  if (count == 0) return 2;
  if (!wide && drowned_in_3 >= kDrowned) return 0;
  const double root = roots / double(count);
  const bool loses = lost / double(count) > kMayLose2 * (root * root) * (root * root);
  return loses || (!wide && drowned_in_2 >= kDrowned) ? 3 : 2;
}

template <int Digits, class T>
void write_chunks(const T* raw, int64_t n, const Coding& coding, uint8_t* to) {
  for (int64_t c = 0; c < chunks_of(n); ++c, to += chunk_bytes(Digits)) {
    int32_t integers[4][kGroup], corrections[4];
    float units[4];
    for (int g = 0; g < 4; ++g) {  // all of it is read before the chunk is written: it may lie in the same place
      float x[kGroup], scaled[kGroup];
      read_group(raw, c * 4 + g, n, x);
      units[g] = to_integers<Digits == 2 ? 14 : 21>(x, scaled, integers[g]) * coding.unit;
      int32_t sum = 0;
      for (int i = 0; i < kGroup; ++i) sum += integers[g][i];
      corrections[g] = coding.zero_points ? int32_t(to_bits(float(-sum))) : -coding.offset * sum;
    }
    for (int g = 0; g < 4; ++g)
      for (int d = Digits - 1; d >= 0; --d)
        for (int i = 0; i < kGroup; ++i) {
          int32_t& value = integers[g][i];
          to[d * kDigit + (i & 1) * kPlane + g * 16 + i / 2] = uint8_t(value);
          value = (value + 128) >> 8;
        }
    std::memcpy(to + Digits * kDigit, units, 16);
    std::memcpy(to + Digits * kDigit + 16, corrections, 16);
  }
}

// Bits of the largest magnitude of a vector: NaN above inf above all numbers.
template <class T>
uint32_t largest_magnitude(const T* raw, int64_t n) {
  uint32_t most = 0;
  for (int64_t k = 0; k < n; ++k) {
    const uint32_t size = to_bits(to_float(raw[k])) & 0x7fffffffu;
    most = size > most ? size : most;
  }
  return most;
}

template <class T>
void prepare_values(const T* raw, bool wide, int64_t n, const Coding& coding, uint8_t* memory, Vector* out) {
  const uint32_t most = largest_magnitude(raw, n);
  *out = {raw, wide, 0, memory};
  int largest = int(most >> 23);
  if (most != 0 && (largest < kSmallest || largest >= kLargest)) return;
  if (most == 0) largest = 127;
  out->num_digits = digits_needed(raw, wide, n, largest);
  if (out->num_digits == 2) write_chunks<2>(raw, n, coding, memory);
  if (out->num_digits == 3) write_chunks<3>(raw, n, coding, memory);
}

inline void prepare(const void* raw, bool wide, int64_t n, const Coding& coding, void* memory, Vector* out) {
  uint8_t* to = static_cast<uint8_t*>(memory);
  if (wide)
    prepare_values(static_cast<const float*>(raw), wide, n, coding, to, out);
  else
    prepare_values(static_cast<const uint16_t*>(raw), wide, n, coding, to, out);
}

}  // namespace
