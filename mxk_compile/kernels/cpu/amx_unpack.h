// AMX: packed rows to A tiles, 16 rows of 32 bf16 weights. Included by isa_amx.cpp alone.
//
// Order of a group's 32 values in a tile row: word 8 l + w is value 4 w + l, so that one variable shift of 4 copies of the
// 16 packed bytes brings every nibble to the low bits of its word. vpermw, which looks at the low 5 bits of an index,
// turns words into weights through a table: 32 words that hold everything twice, so that what stands above the nibble does
// no harm (MXFP4); or 16 fp32 values, of which it takes the upper halves (INT4).
#pragma once
#include <utility>

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

constexpr int kChunkGroups = 4;  // 64 packed bytes of a row: what is unpacked at a time

template <class F, int... I>
inline __attribute__((always_inline)) void unroll(F&& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>()), ...);
}
template <int N, class F>
inline __attribute__((always_inline)) void unroll(F&& f) {
  unroll(f, std::make_integer_sequence<int, N>());
}

// 4 copies of 16 packed bytes.
inline __m512i copies(__m128i bytes) { return _mm512_broadcast_i32x4(bytes); }

// Calls row(r) or, for a chunk in which the rows end, group(r, j, codes) for each group, of all rows.
template <class Row, class Group>
inline __attribute__((always_inline)) void for_rows(const Tile& tile, int64_t c, Row&& row, Group&& group) {
  const int64_t bytes = (tile.columns + 1) / 2 - c * 64;
  for (int r = 0; r < tile.rows; ++r) {
    if (__builtin_expect(bytes >= 64, 1)) {
      row(r);
      continue;
    }
    const uint8_t* at = tile.weight + r * tile.weight_step + c * 64;
    for (int j = 0; j * 16 < bytes; ++j)
      group(r, j, copies(_mm_maskz_loadu_epi8(group_bytes(tile.columns, c * kChunkGroups + j), at + 16 * j)));
  }
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

  // What `row` needs beside the tile: nibbles to the low bits of words, by shifts or by multishift.
  struct Constants {
    __m512i shifts = _mm512_set_epi64(0x000c000c000c000c, 0x000c000c000c000c, 0x0008000800080008, 0x0008000800080008,
                                      0x0004000400040004, 0x0004000400040004, 0, 0);
    __m512i windows = _mm512_set_epi64(0x3c3c2c2c1c1c0c0c, 0x3c3c2c2c1c1c0c0c, 0x3838282818180808, 0x3838282818180808,
                                       0x3434242414140404, 0x3434242414140404, 0x3030202010100000, 0x3030202010100000);
    const uint16_t (*tables)[32];
  };
  Constants constants() const {
    Constants all;
    all.tables = tables_;
    return all;
  }

  // Where rows are read: values of their own, as compilers take the stores of tiles for changes of members.
  struct Place {
    const uint8_t *weight, *scale;
    int64_t weight_step, scale_step;
  };
  Place place(int64_t c, int r) const {  // row r of chunk c
    return {tile_.weight + r * tile_.weight_step + c * 64, tile_.scale + r * tile_.scale_step + 4 * c, tile_.weight_step,
            tile_.scale_step};
  }

  // The row r below a place, in a chunk of 64 bytes; group j to `to` + j x Step. vpermw takes both ports that vectors
  // have, a shift the one and multishift the other: by turns they cost less.
  template <int Step>
  static inline __attribute__((always_inline)) void row(const Constants& constants, const Place& from, int r, uint8_t* to) {
    const uint8_t* weight = from.weight + r * from.weight_step;
    uint32_t scales;
    std::memcpy(&scales, from.scale + r * from.scale_step, 4);
    unroll<4>([&](auto j) {
      put<Step>(constants, j(), copies(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weight + 16 * j()))),
                scales >> 8 * j() & 255, to);
    });
  }

  // The same of all rows, of any chunk.
  template <int Step>
  __attribute__((noinline)) void unpack(int64_t c, uint8_t* to) const {
    const Constants all = constants();
    const Place from = place(c, 0);
    for_rows(tile_, c, [&](int r) { row<Step>(all, from, r, to + r * 64); },
             [&](int r, int j, __m512i codes) { put<Step>(all, j, codes, from.scale[r * from.scale_step + j], to + r * 64); });
  }

 private:
  template <int Step>
  static inline __attribute__((always_inline)) void put(const Constants& constants, int j, __m512i codes, int scale, uint8_t* to) {
    const __m512i nibbles = j & 1 ? _mm512_multishift_epi64_epi8(constants.windows, codes)
                                  : _mm512_srlv_epi16(codes, constants.shifts);
    _mm512_store_si512(to + j * Step, _mm512_permutexvar_epi16(nibbles, _mm512_load_si512(constants.tables[scale])));
  }

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

  struct Constants {
    // Rotates by one bit less: the nibble stands in bits 1 to 4, and bit 0 chooses the upper half of its dword.
    __m512i turns = _mm512_set_epi32(11, 11, 11, 11, 7, 7, 7, 7, 3, 3, 3, 3, 31, 31, 31, 31);
    __m512i upper = _mm512_set1_epi32(int(0xffff0000)), one = _mm512_set1_epi16(1);
    __m512 codes;
  };
  Constants constants() const {
    Constants all;
    all.codes = _mm512_load_ps(codes_);
    return all;
  }

  struct Place {
    const uint8_t* weight;
    const float *scale, *zero;
    int64_t weight_step, scale_step;
  };
  Place place(int64_t c, int r) const {
    const int64_t at = r * line_ + 4 * c;
    return {tile_.weight + r * tile_.weight_step + c * 64, scales_ + at, zeros_ + at, tile_.weight_step, line_};
  }

  // As Mxfp4; upper parts, then a tile of lower parts.
  template <int Step>
  static inline __attribute__((always_inline)) void row(const Constants& constants, const Place& from, int r, uint8_t* to) {
    const uint8_t* weight = from.weight + r * from.weight_step;
    unroll<4>([&](auto j) {
      put<Step>(constants, from, r, j(), copies(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weight + 16 * j()))), to);
    });
  }

  template <int Step>
  __attribute__((noinline)) void unpack(int64_t c, uint8_t* to) const {
    const Constants all = constants();
    const Place from = place(c, 0);
    for_rows(tile_, c, [&](int r) { row<Step>(all, from, r, to + r * 64); },
             [&](int r, int j, __m512i codes) { put<Step>(all, from, r, j, codes, to + r * 64); });
  }

 private:
  template <int Step>
  static inline __attribute__((always_inline)) void put(const Constants& constants, const Place& from, int r, int j, __m512i codes,
                                                        uint8_t* to) {
    const __m512 scale = _mm512_set1_ps(from.scale[r * from.scale_step + j]);
    const __m512 value = Zero ? _mm512_fmsub_ps(constants.codes, scale, _mm512_set1_ps(from.zero[r * from.scale_step + j]))
                              : _mm512_mul_ps(constants.codes, scale);
    const __m512i bits = _mm512_castps_si512(value);
    const __m512 upper = _mm512_castsi512_ps(_mm512_and_si512(bits, constants.upper));
    const __m512i rest = _mm512_castps_si512(_mm512_sub_ps(value, upper));
    const __m512i index = _mm512_or_si512(_mm512_rorv_epi32(codes, constants.turns), constants.one);
    uint8_t* tile = to + j * Step;
    _mm512_store_si512(tile, _mm512_permutexvar_epi16(index, bits));
    _mm512_store_si512(tile + kTileBytes, _mm512_permutexvar_epi16(index, rest));
  }

  Tile tile_;
  alignas(64) float codes_[16];
  float *scales_, *zeros_;
  int64_t line_;
};

}  // namespace
