// Plain fp32 arithmetic on packed rows: the weight's exact value, IEEE throughout. The path of vectors and rows that
// integer arithmetic cannot hold, and the yardstick of the fast paths. Included by every instruction set's unit; all
// in an anonymous namespace, so that no unit runs code compiled for another.
#pragma once
#include <cstring>

#include "tile.h"

namespace {

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float from_bf16(uint16_t half) { return from_bits(uint32_t(half) << 16); }
inline float from_f16(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) return from_bits(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
  if (magnitude < 0x400) {  // subnormal: magnitude * 2^-24
    const float value = float(magnitude) * 0x1p-24f;
    return sign ? -value : value;
  }
  return from_bits(sign | ((magnitude << 13) + (112u << 23)));
}
// OCP E8M0: 2^(byte - 127), 255 is NaN; byte 0 is the subnormal 2^-127.
inline float from_e8m0(uint8_t byte) {
  return from_bits(byte == 255 ? 0x7fc00000u : byte == 0 ? 0x00400000u : uint32_t(byte) << 23);
}
inline float load_float(const uint8_t* at, int64_t dtype) {
  uint16_t half;
  float value;
  switch (dtype) {
    case MXK_U8: return from_e8m0(*at);
    case MXK_BF16: std::memcpy(&half, at, 2); return from_bf16(half);
    case MXK_F16: std::memcpy(&half, at, 2); return from_f16(half);
    default: std::memcpy(&value, at, 4); return value;
  }
}
inline int64_t dtype_bytes(int64_t dtype) { return dtype == MXK_U8 ? 1 : dtype == MXK_F32 ? 4 : 2; }

// Twice the E2M1 values: integers.
constexpr int8_t kTwiceE2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Values of the 16 codes; integers, or E2M1 with its signed zero.
inline void code_values(int64_t format, float (&values)[16]) {
  for (int code = 0; code < 16; ++code) {
    const float e2m1 = 0.5f * kTwiceE2M1[code];
    values[code] = format == MXK_MXFP4 ? (code == 8 ? -0.0f : e2m1)
                   : format == MXK_INT4 ? float((code ^ 8) - 8) : float(code);
  }
}

inline float scale_of(const Tile& tile, int r, int64_t group) {
  const int64_t bytes = dtype_bytes(tile.scale_dtype);
  const uint8_t* at = tile.transposed ? tile.scale + group * tile.scale_step + (tile.column0 + r * tile.column_step) * bytes
                                      : tile.scale + r * tile.scale_step + group * bytes;
  return load_float(at, tile.scale_dtype);
}
inline float zero_of(const Tile& tile, int r, int64_t group) {
  if (!tile.transposed) return float(tile.zero[r * tile.zero_step + group]);
  const int64_t column = tile.column0 + r * tile.column_step;
  const uint8_t* line = tile.zero + group * tile.zero_step;
  return tile.zero_dtype == MXK_U8 ? float(line[column]) : float(line[column >> 1] >> (column & 1) * 4 & 15);
}

// row[0..columns) = the weight values of tile row r.
inline void dequantize_row(const Tile& tile, int r, float* row) {
  float values[16];
  code_values(tile.format, values);
  const int64_t column = tile.column0 + r * tile.column_step;
  const uint8_t* line = tile.weight + r * tile.weight_step;
  for (int64_t start = 0, group = 0; start < tile.columns; start += tile.group, ++group) {
    const int64_t end = start + tile.group < tile.columns ? start + tile.group : tile.columns;
    const float scale = scale_of(tile, r, group);
    const float zero = tile.zero ? zero_of(tile, r, group) : tile.format == MXK_UINT4 ? 8.0f : 0.0f;
    if (tile.transposed)
      for (int64_t k = start; k < end; ++k)
        row[k] = (values[tile.weight[k * tile.weight_step + (column >> 1)] >> (column & 1) * 4 & 15] - zero) * scale;
    else
      for (int64_t k = start; k < end; k += 2) {
        const uint8_t byte = line[k >> 1];
        row[k] = (values[byte & 15] - zero) * scale;
        if (k + 1 < end) row[k + 1] = (values[byte >> 4] - zero) * scale;
      }
  }
}

inline float to_float(uint16_t bf16) { return from_bf16(bf16); }
inline float to_float(float value) { return value; }

template <class T>
inline float dot(const float* row, const T* x, int64_t n) {
  constexpr int kLanes = 16;
  float sums[kLanes] = {};
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += row[k + lane] * to_float(x[k + lane]);
  for (; k < n; ++k) sums[k % kLanes] += row[k] * to_float(x[k]);
  for (int width = kLanes / 2; width; width /= 2)
    for (int lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  return sums[0];
}

// The same from a vector's chunks: its integers times their unit. For fp32 vectors, which their chunks replace.
inline float dot_chunks(const float* row, const Vector& x, int64_t n, float coding_unit) {
  float sum = 0;
  for (int64_t k = 0; k < n; ++k) {
    const uint8_t* chunk = x.chunks + k / 128 * chunk_bytes(x.num_digits);
    const int64_t group = k / kGroup % 4, i = k % kGroup;
    float unit;
    std::memcpy(&unit, chunk + chunk_bytes(x.num_digits) - 32 + group * 4, 4);
    int16_t half;
    std::memcpy(&half, chunk + (group * kGroup + i) * 2, 2);
    int32_t value = x.num_digits == 1 ? half : 0;
    for (int d = 0; x.num_digits > 1 && d < x.num_digits; ++d)
      value = value * 256 + int8_t(chunk[d * kDigit + (i & 1) * kPlane + group * 16 + i / 2]);
    sum += row[k] * (float(value) * unit / coding_unit);
  }
  return sum;
}

inline float dot(const float* row, const Vector& x, int64_t n, float coding_unit) {
  if (!x.wide) return dot(row, static_cast<const uint16_t*>(x.raw), n);
  if (x.num_digits > 0) return dot_chunks(row, x, n, coding_unit);
  return dot(row, static_cast<const float*>(x.raw), n);
}

inline float bias_of(const Tile& tile, int r) {
  return tile.bias ? load_float(tile.bias + r * tile.bias_step, tile.bias_dtype) : 0.0f;
}

// A value below 2^-9 (2^-16) of the largest of its group keeps 6 significant bits or fewer in 2 (3) digits. Where six of a
// group are so small, one large value drowns the rest, and weights that are zero at it would show that: a token takes
// the third digit, or plain fp32; not the intermediate, whose small values are what the activation has switched off. Groups of normally distributed values hardly ever have six (0.1 expected).
constexpr int kDrowned = 6;
constexpr int32_t kDrownedIn2 = 9 << 23, kDrownedIn3 = 16 << 23;

// Rows in `rows` (bit mask) for all vectors, the others for the vectors without digits.
inline void exact_tile(const Tile& tile, const Vector* const* vectors, int count, uint32_t rows,
                       const TileScratch& scratch, float (*out)[16]) {
  bool any = rows != 0;
  for (int t = 0; t < count; ++t) any |= vectors[t]->num_digits == 0;
  if (!any) return;
  const float unit = coding_of(tile.format, tile.zero != nullptr).unit;
  for (int r = 0; r < tile.rows; ++r) {
    const bool all = rows >> r & 1;
    dequantize_row(tile, r, scratch.row);
    for (int t = 0; t < count; ++t)
      if (all || vectors[t]->num_digits == 0) out[t][r] = dot(scratch.row, *vectors[t], tile.columns, unit) + bias_of(tile, r);
  }
}

// e^x to 1e-7 relative: 2^n by exponent bits (twice, so that results near the ends stay exact), e^r by a minimax-like
// degree 6 polynomial on |r| <= ln2 / 2 (Taylor; the last term left out is below 2^-27). inf above 88.8, 0 below -104.
inline float exp_fp32(float x) {
  const float clamped = x < -104.0f ? -104.0f : x > 89.0f ? 89.0f : x;
  const float n = (clamped * 1.44269504f + 12582912.0f) - 12582912.0f;
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const int whole = int(n), half = whole >> 1;
  const float result = p * from_bits(uint32_t(half + 127) << 23) * from_bits(uint32_t(whole - half + 127) << 23);
  return x != x ? x : result;
}

template <int64_t kKind>
inline void activate_as(const Activation& a, const float (*gate)[16], const float (*up)[16], int count, int rows,
                        float* const* h) {
  const float limit = a.limit, alpha = a.alpha;
  for (int t = 0; t < count; ++t) {
    float result[16];
    for (int r = 0; r < 16; ++r) {  // one vector operation after the other where registers allow
      float g = gate[t][r], u = up[t][r];
      if (kKind != MXK_SILU) {  // comparisons that let NaN through
        g = g > limit ? limit : g;
        u = u > limit ? limit : u < -limit ? -limit : u;
      }
      result[r] = kKind == MXK_SWIGLU_OAI ? g * (1.0f / (1.0f + exp_fp32(-alpha * g))) * (u + 1.0f)
                                          : g / (1.0f + exp_fp32(-g)) * u;
    }
    std::memcpy(h[t], result, size_t(rows) * 4);
  }
}

inline void activate_rows(const Activation& a, const float (*gate)[16], const float (*up)[16], int count, int rows,
                          float* const* h) {
  if (a.kind == MXK_SILU)
    activate_as<MXK_SILU>(a, gate, up, count, rows, h);
  else if (a.kind == MXK_SWIGLU_CLAMP)
    activate_as<MXK_SWIGLU_CLAMP>(a, gate, up, count, rows, h);
  else
    activate_as<MXK_SWIGLU_OAI>(a, gate, up, count, rows, h);
}

}  // namespace
