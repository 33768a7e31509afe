// Roundings between the formats that the kernels use.
#include <cmath>
#include <cstring>

#include "runtime.h"

namespace emu {

namespace {

u32 bits_of(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return bits;
}

// fp32 bits that round to shorter formats as the exact value does: the last bit says whether there was more.
u32 round_to_odd(double value) {
  const float near = static_cast<float>(value);
  u32 bits = bits_of(near);
  if (std::isnan(near) || near == value) return bits;
  if (std::fabs(near) > std::fabs(value)) --bits;
  return bits | 1;
}

}  // namespace

u16 to_bf16(double value) {
  if (std::isnan(value)) return 0x7FFF;
  const u32 bits = round_to_odd(value);
  return static_cast<u16>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

u16 to_f16(double value) {
  const u16 sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return 0x7FFF;
  const double magnitude = std::fabs(value);
  if (magnitude >= 65520) return sign | 0x7C00;
  const int exponent = magnitude == 0 ? -14 : std::fmax(std::ilogb(magnitude), -14);
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));  // 1024 is the lowest normal
  return static_cast<u16>(sign | (steps + ((exponent + 14) << 10)));
}

float from_f16(u16 bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                              : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
  if (exponent == 31) value = mantissa ? NAN : INFINITY;
  return bits & 0x8000 ? -value : value;
}

float from_e4m3(u8 bits) {
  static const auto values = [] {
    struct {
      float of[256];
    } all;
    for (int code = 0; code < 256; ++code) {
      const int exponent = code >> 3 & 15, mantissa = code & 7;
      const float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                        : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
      all.of[code] = std::copysign((code & 127) == 127 ? NAN : value, code & 128 ? -1.0f : 1.0f);
    }
    return all;
  }();
  return values.of[bits];
}

u8 to_e4m3(float value) {
  const u8 sign = std::signbit(value) ? 128 : 0;
  if (std::isnan(value)) return 127;
  const float magnitude = std::fmin(std::fabs(value), 448.0f);
  const int exponent = magnitude == 0 ? -6 : std::fmax(std::ilogb(magnitude), -6);
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  return static_cast<u8>(sign | (steps + ((exponent + 6) << 3)));
}

}  // namespace emu
