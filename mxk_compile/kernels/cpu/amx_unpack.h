// AMX: packed rows to A tiles, 16 rows of 32 bf16 weights. Included by isa_amx.cpp alone.
//
// Order of a group's 32 values in a tile row: word 8 l + w is value 4 w + l, so that one variable shift of 4 copies of the
// 16 packed bytes brings every nibble to the low bits of its word. vpermw, which looks at the low 5 bits of an index,
// turns words into weights through a table: 32 words that hold everything twice, so that what stands above the nibble does
// no harm (MXFP4); or 16 fp32 values, of which it takes the upper halves (INT4).
#pragma once
#include "avx512_unpack.h"

namespace {

// The smallest magnitudes that the unit takes: with |x| >= 2^-64 or 0, and weights of 2^-39 or more, all products and all
// their sums are multiples of 2^-116 (7 bits below each) and never subnormal, which the unit would flush.
constexpr int kLeastExponent = 127 - 64;      // of tokens, biased
constexpr int kLeastScaleByte = 127 - 38;     // E8M0
constexpr int kMostScaleByte = 252;           // 6 times the next is infinite
constexpr float kLeastScale = 0x1p-38f, kMostScale = 0x1p120f;  // INT4, magnitude

// Bytes of group g in a row of `columns` nibbles, as a mask; 0xffff but for the last group.
inline __mmask16 group_bytes(int64_t columns, int64_t g) {
  const int64_t left = (columns + 1) / 2 - g * 16;
  return left >= 16 ? 0xffff : __mmask16((1u << left) - 1);
}

constexpr int kChunkGroups = 4;  // 64 packed bytes of a row: what is unpacked at a time, 4 rows after 4 rows

// Calls group(j, codes) for the groups of chunk c of a row, with 4 copies of the 16 packed bytes of each.
template <class F>
inline __attribute__((always_inline)) void for_groups(const uint8_t* row, int64_t c, int64_t columns, F&& group) {
  const uint8_t* at = row + c * 64;
  const auto whole = [&](int j) {
    group(j, _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at + 16 * j))));
  };
  const int64_t bytes = (columns + 1) / 2 - c * 64;
  if (__builtin_expect(bytes >= 64, 1)) return whole(0), whole(1), whole(2), whole(3);
  for (int j = 0; j * 16 < bytes; ++j)
    group(j, _mm512_broadcast_i32x4(_mm_maskz_loadu_epi8(group_bytes(columns, c * kChunkGroups + j), at + 16 * j)));
}

// ---- MXFP4 ---------------------------------------------------------------------------------------------------------

// The weights of the 16 codes under each scale byte, twice over: exact in bf16 but for bytes that Mxfp4 calls special.
struct Mxfp4Tables {
  alignas(64) uint16_t words[256][32];
  Mxfp4Tables() {
    for (int byte = 0; byte < 256; ++byte)
      for (int code = 0; code < 32; ++code) {
        const float value = 0.5f * kTwiceE2M1[code & 15];
        const uint32_t bits = to_bits(code % 16 == 8 ? -0.0f : value);
        const uint32_t scaled = value == 0 ? bits : bits + (uint32_t(byte - 127) << 23);
        words[byte][code] = uint16_t(scaled >> 16);
      }
  }
};

class Mxfp4 {
 public:
  static constexpr int kParts = 1;
  struct Memory {
    explicit Memory(const MatrixScratch&, int) {}
  };

  // Returns the rows with a group of weights that are not all zero and no ordinary numbers for the unit.
  uint32_t open(const Tile& tile, const Memory&) {
    static const Mxfp4Tables kTables;
    tables_ = kTables.words;
    tile_ = tile;
    const int64_t groups = groups_of(tile.columns);
    uint32_t special = 0;
    for (int r = 0; r < tile.rows; ++r) {
      const uint8_t* scale = tile.scale + r * tile.scale_step;
      for (int64_t first = 0; first < groups; first += 64) {
        const int64_t left = groups - first;
        const __mmask64 mask = left >= 64 ? ~uint64_t(0) : (uint64_t(1) << left) - 1;
        const __m512i bytes = _mm512_maskz_loadu_epi8(mask, scale + first);
        const __m512i above = _mm512_sub_epi8(bytes, _mm512_set1_epi8(char(kLeastScaleByte)));
        uint64_t odd = mask & _mm512_cmpgt_epu8_mask(above, _mm512_set1_epi8(char(kMostScaleByte - kLeastScaleByte)));
        for (; __builtin_expect(odd != 0, 0); odd &= odd - 1) {
          const int64_t g = first + __builtin_ctzll(odd);
          const __m128i codes = _mm_maskz_loadu_epi8(group_bytes(tile.columns, g), tile.weight + r * tile.weight_step + g * 16);
          const bool zeros = _mm_testz_si128(codes, _mm_set1_epi8(0x77)) != 0;
          if (scale[g] == 255 || !zeros) special |= 1u << r;
        }
      }
    }
    return special;
  }

  // Rows 4 quarter ... + 4 of chunk c, group j to the tile at `to` + j x Step. Not inlined: registers are scarce around it.
  template <int Step>
  __attribute__((noinline)) void unpack(int64_t c, int quarter, uint8_t* to) const {
    const __m512i shifts = _mm512_set_epi64(0x000c000c000c000c, 0x000c000c000c000c, 0x0008000800080008, 0x0008000800080008,
                                            0x0004000400040004, 0x0004000400040004, 0, 0);
    const auto tables = tables_;  // locals, as the compiler takes the stores for changes of the members
    const int64_t weight_step = tile_.weight_step, scale_step = tile_.scale_step, columns = tile_.columns;
    const int first = 4 * quarter, end = first + 4 < tile_.rows ? first + 4 : tile_.rows;
    const uint8_t *weight = tile_.weight + first * weight_step, *scale = tile_.scale + first * scale_step + 4 * c;
    to += first * 64;
    for (int r = first; r < end; ++r, weight += weight_step, scale += scale_step, to += 64)
      for_groups(weight, c, columns, [&](int j, __m512i codes) {
        const __m512i table = _mm512_load_si512(tables[scale[j]]);
        _mm512_store_si512(to + j * Step, _mm512_permutexvar_epi16(_mm512_srlv_epi16(codes, shifts), table));
      });
  }

 private:
  Tile tile_;
  const uint16_t (*tables_)[32];
};

// ---- INT4 ----------------------------------------------------------------------------------------------------------

// (code - zero point) * scale has up to 16 significant bits: two parts of 8, each exact in bf16, in two tiles.
template <bool Zero>
class Int4 {
 public:
  static constexpr int kParts = 2;
  struct Memory {
    float *scales, *zeros;
    Memory(const MatrixScratch& scratch, int tile)
        : scales(scratch.scales + tile * scratch.row_scales * 16), zeros(scratch.zeros + tile * scratch.row_scales * 16) {}
  };

  uint32_t open(const Tile& tile, const Memory& memory) {
    tile_ = tile, scales_ = memory.scales, zeros_ = memory.zeros;
    for (int code = 0; code < 16; ++code)
      codes_[code] = tile.format == MXK_INT4 ? float((code ^ 8) - 8) : Zero ? float(code) : float(code - 8);
    const int64_t groups = groups_of(tile.columns), shared = tile.group >= tile.columns ? groups : tile.group / kGroup;
    line_ = (groups + 15) / 16 * 16;
    uint32_t special = 0;
    for (int r = 0; r < tile.rows; ++r) {
      float *scales = scales_ + r * line_, *zeros = zeros_ + r * line_;
      const uint8_t* from = tile.scale + r * tile.scale_step;
      const __m512i magnitude_bits = _mm512_set1_epi32(0x7fffffff);
      __mmask16 odd = 0;
      const auto check = [&](__m512 v) {
        const __m512 size = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), magnitude_bits));
        odd |= _mm512_mask_cmp_ps_mask(_mm512_test_epi32_mask(_mm512_castps_si512(size), magnitude_bits), size,
                                       _mm512_set1_ps(kLeastScale), _CMP_NGE_UQ);
        odd |= _mm512_cmp_ps_mask(size, _mm512_set1_ps(kMostScale), _CMP_NLE_UQ);
      };
      if (shared == 1 && tile.scale_dtype == MXK_BF16) {
        for (int64_t g = 0; g < groups; g += 16) {
          const __mmask16 mask = groups - g >= 16 ? 0xffff : __mmask16((1u << (groups - g)) - 1);
          const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from + 2 * g));
          const __m512 v = _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
          check(v);
          _mm512_store_ps(scales + g, v);
        }
      } else {
        for (int64_t g = 0, u = 0; g < groups; ++u) {
          const float scale = load_float(from + u * dtype_bytes(tile.scale_dtype), tile.scale_dtype);
          check(_mm512_set1_ps(scale));
          for (int64_t end = g + shared < groups ? g + shared : groups; g < end; ++g) scales[g] = scale;
        }
      }
      if (Zero)
        for (int64_t g = 0, u = 0; g < groups; ++u) {
          const float zero = float(tile.zero[r * tile.zero_step + u]);
          for (int64_t end = g + shared < groups ? g + shared : groups; g < end; ++g) zeros[g] = zero * scales[g];
        }
      if (odd) special |= 1u << r;
    }
    return special;
  }

  // As Mxfp4; upper parts, then a tile of lower parts.
  template <int Step>
  __attribute__((noinline)) void unpack(int64_t c, int quarter, uint8_t* to) const {
    // Rotates by one bit less: the nibble stands in bits 1 to 4, and bit 0 chooses the upper half of its dword.
    const __m512i turns = _mm512_set_epi32(11, 11, 11, 11, 7, 7, 7, 7, 3, 3, 3, 3, 31, 31, 31, 31);
    const __m512i upper_bits = _mm512_set1_epi32(int(0xffff0000)), one = _mm512_set1_epi16(1);
    const __m512 values = _mm512_load_ps(codes_);
    const int64_t weight_step = tile_.weight_step, line = line_, columns = tile_.columns;
    const int first = 4 * quarter, end = first + 4 < tile_.rows ? first + 4 : tile_.rows;
    const uint8_t* weight = tile_.weight + first * weight_step;
    to += first * 64;
    const float *scale = scales_ + first * line + 4 * c, *zero = zeros_ + first * line + 4 * c;
    for (int r = first; r < end; ++r, weight += weight_step, scale += line, zero += line, to += 64)
      for_groups(weight, c, columns, [&](int j, __m512i codes) {
        const __m512 s = _mm512_set1_ps(scale[j]);
        const __m512 value = Zero ? _mm512_fmsub_ps(values, s, _mm512_set1_ps(zero[j])) : _mm512_mul_ps(values, s);
        const __m512i bits = _mm512_castps_si512(value);
        const __m512 upper = _mm512_castsi512_ps(_mm512_and_si512(bits, upper_bits));
        const __m512i rest = _mm512_castps_si512(_mm512_sub_ps(value, upper));
        const __m512i index = _mm512_or_si512(_mm512_rorv_epi32(codes, turns), one);
        _mm512_store_si512(to + j * Step, _mm512_permutexvar_epi16(index, bits));
        _mm512_store_si512(to + j * Step + kTileBytes, _mm512_permutexvar_epi16(index, rest));
      });
  }

 private:
  Tile tile_;
  alignas(64) float codes_[16];
  float *scales_, *zeros_;
  int64_t line_;
};

}  // namespace
