// AVX-512: scales, zero points and weight codes of a tile, one output row per lane. Included by isa_avx512.cpp alone.
#pragma once
#include <immintrin.h>

#include "exact.h"

namespace {

// As assembly: GCC takes functions that do nothing but prefetch for pure, and drops their calls.
inline void prefetch(const uint8_t* at) { asm volatile("prefetcht0 %0" ::"m"(*at)); }
inline void prefetch_second(const uint8_t* at) { asm volatile("prefetcht1 %0" ::"m"(*at)); }

// Lines to be asked for, a row each: from memory into the second cache, and later from there into the first, which a line
// reaches so soon that it holds one of the core's 16 line fill buffers for a short time only. A few at a time, between other
// work: the core waits at each that finds no buffer, and does not come to the next ones while it works off what it has.
struct Lines {
  const uint8_t* at;
  int64_t step;
  int last;
  const uint8_t* row(int r) const { return at + (r < last ? r : last) * step; }
};

struct Ahead {
  Lines first, second;  // cache
  void ask(int from, int count) const {
    for (int r = from; r < from + count; ++r) prefetch(first.row(r)), prefetch_second(second.row(r));
  }
};

// 16 x 16 dwords.
inline void transpose(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// ---- scales and zero points ----------------------------------------------------------------------------------------

// How the 16 rows and the groups of a tile share the lanes of a register.
enum Lanes {
  kRows,       // one group: a row per lane
  kRowGroups,  // a quad of rows in 4 groups: lane 4 g + i is group g of row i
};

// The bytes [16 rows][count] of rows `step` apart, by group: to[count][16 rows], or for kRowGroups by chunk and quad:
// to[count / 16][4 quads][4 chunks][4 groups][4 rows]. With Check, the rows that hold an E8M0 byte of which a product
// with some code is no ordinary number: 0, 253, 254 (times 6 leaves the range), 255.
template <Lanes kLanes, bool Check>
inline uint32_t transpose_bytes(const uint8_t* base, int64_t step, int rows, int64_t count, uint8_t* to) {
  struct Order {
    alignas(64) uint8_t at[64];
    Order() {
      for (int lane = 0; lane < 4; ++lane)
        for (int i = 0; i < 4; ++i)
          for (int j = 0; j < 4; ++j)
            at[lane * 16 + i * 4 + j] = uint8_t(j * 16 + (kLanes == kRows ? 4 * i + lane : 4 * lane + i));
    }
  };
  static const Order kOrder;
  const __m512i order = _mm512_load_si512(kOrder.at);
  uint32_t special = 0;
  for (int64_t first = 0; first < count; first += 16) {
    const __mmask16 mask = count - first >= 16 ? 0xffff : (1u << (count - first)) - 1;
    __m512i z[4];
    for (int q = 0; q < 4; ++q) {
      __m128i row[4];
      for (int j = 0; j < 4; ++j)
        row[j] = _mm_maskz_loadu_epi8(mask, base + (4 * q + j < rows ? 4 * q + j : 0) * step + first);
      z[q] = _mm512_inserti32x4(_mm512_castsi128_si512(row[0]), row[1], 1);
      z[q] = _mm512_inserti32x4(_mm512_inserti32x4(z[q], row[2], 2), row[3], 3);
      if (Check) {
        const __m512i less = _mm512_sub_epi8(z[q], _mm512_set1_epi8(1));
        const uint64_t odd = _mm512_cmpgt_epu8_mask(less, _mm512_set1_epi8(char(251))) & (mask * 0x0001000100010001u);
        if (__builtin_expect(odd != 0, 0))
          for (int j = 0; j < 4; ++j) special |= uint32_t((odd >> 16 * j & 0xffff) != 0) << (4 * q + j);
      }
      z[q] = _mm512_permutexvar_epi8(order, z[q]);
    }
    if (kLanes == kRows) {
      const __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpackhi_epi32(z[0], z[1]);
      const __m512i c = _mm512_unpacklo_epi32(z[2], z[3]), d = _mm512_unpackhi_epi32(z[2], z[3]);
      z[0] = _mm512_unpacklo_epi64(a, c), z[1] = _mm512_unpackhi_epi64(a, c);
      z[2] = _mm512_unpacklo_epi64(b, d), z[3] = _mm512_unpackhi_epi64(b, d);
    }
    for (int q = 0; q < 4; ++q) _mm512_store_si512(to + first * 16 + q * 64, z[q]);
  }
  return special;
}

// 4 groups of 16 rows -> 4 quads of rows in 4 groups.
inline void to_quads(__m512i (&v)[4]) {
  const __m512i a = _mm512_shuffle_i32x4(v[0], v[1], 0x88), b = _mm512_shuffle_i32x4(v[2], v[3], 0x88);
  const __m512i c = _mm512_shuffle_i32x4(v[0], v[1], 0xdd), d = _mm512_shuffle_i32x4(v[2], v[3], 0xdd);
  v[0] = _mm512_shuffle_i32x4(a, b, 0x88), v[2] = _mm512_shuffle_i32x4(a, b, 0xdd);
  v[1] = _mm512_shuffle_i32x4(c, d, 0x88), v[3] = _mm512_shuffle_i32x4(c, d, 0xdd);
}

constexpr int kNotFinite = 0x99;  // vfpclassps: quiet and signalling NaN, both infinities

// to[count][16] = fp32 of scales [16][count]; returns the rows that hold inf or NaN.
inline uint32_t transpose_floats(const Tile& tile, int64_t count, float* to) {
  uint32_t special = 0;
  if (tile.scale_dtype == MXK_BF16) {  // two scales a dword
    for (int64_t first = 0; first < count; first += 32) {
      const __mmask32 mask = count - first >= 32 ? 0xffffffffu : (1u << (count - first)) - 1;
      const __m512i exponent = _mm512_set1_epi16(0x7f80);
      __m512i v[16];
      for (int r = 0; r < 16; ++r) {
        v[r] = _mm512_maskz_loadu_epi16(mask, tile.scale + (r < tile.rows ? r : 0) * tile.scale_step + 2 * first);
        special |= uint32_t(_mm512_cmpeq_epi16_mask(_mm512_and_si512(v[r], exponent), exponent) != 0) << r;
      }
      transpose(v);
      for (int i = 0; i < 16; ++i) {
        _mm512_store_si512(to + (first + 2 * i) * 16, _mm512_slli_epi32(v[i], 16));
        _mm512_store_si512(to + (first + 2 * i + 1) * 16, _mm512_and_si512(v[i], _mm512_set1_epi32(int(0xffff0000))));
      }
    }
    return special;
  }
  for (int64_t first = 0; first < count; first += 16) {
    const __mmask16 mask = count - first >= 16 ? 0xffff : (1u << (count - first)) - 1;
    __m512i v[16];
    for (int r = 0; r < 16; ++r) {
      const uint8_t* row = tile.scale + (r < tile.rows ? r : 0) * tile.scale_step;
      const __m512 value = tile.scale_dtype == MXK_F32 ? _mm512_maskz_loadu_ps(mask, row + 4 * first)
                                                       : _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, row + 2 * first));
      special |= uint32_t(_mm512_fpclass_ps_mask(value, kNotFinite) != 0) << r;
      v[r] = _mm512_castps_si512(value);
    }
    transpose(v);
    for (int i = 0; i < 16; ++i) _mm512_store_si512(to + (first + i) * 16, v[i]);
  }
  return special;
}

// Bytes of a line of nibbles that hold the tile's columns: 8 adjacent, or 16 if every other column is the tile's.
inline __mmask16 nibble_bytes(const Tile& tile) {
  const int bytes = tile.column_step == 1 ? (tile.rows + 1) / 2 : tile.rows;
  return __mmask16((1u << bytes) - 1);
}

// Scales and zero points of a tile, handed out by chunks of 4 groups.
template <Lanes kLanes>
class Scales {
 public:
  // `scales` and `zeros`: memory of scales_capacity(columns) x 16.
  Scales(const Tile& tile, float* scales, uint8_t* zeros) : tile_(tile), scales_(scales), zeros_(zeros) {
    const int64_t count = (tile.columns + tile.group - 1) / tile.group;
    groups_ = groups_of(tile.columns);
    step_ = tile.group >= tile.columns ? groups_ : tile.group / kGroup;
    uint8_t* bytes = reinterpret_cast<uint8_t*>(scales_);
    if (tile.transposed)
      load_lines(count);
    else if (tile.scale_dtype == MXK_U8)
      special_ = transpose_bytes<kLanes, true>(tile.scale, tile.scale_step, tile.rows, count, bytes);
    else
      special_ = transpose_floats(tile, count, scales_);
    if (tile.zero && !tile.transposed)
      transpose_bytes<kRows, false>(tile.zero, tile.zero_step, tile.rows, count, zeros_);
  }

  uint32_t special() const { return special_; }  // rows whose scales need exact.h

  // scales, zeros [4][16] of the chunk that begins with group `first`; 0 for groups that do not exist.
  void get(int64_t first, float* scales, float* zeros) const {
    __m512i v[4];
    if (tile_.scale_dtype == MXK_U8) {  // groups beyond the end were read as byte 0, and 0 << 23 is 0.0
      const uint8_t* chunk = reinterpret_cast<const uint8_t*>(scales_);
      chunk += kLanes == kRows ? first * 16 : first / 16 * 256 + first % 16 * 4;
      for (int i = 0; i < 4; ++i) {
        const __m128i* bytes = reinterpret_cast<const __m128i*>(chunk + i * (kLanes == kRows ? 16 : 64));
        v[i] = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_load_si128(bytes)), 23);
      }
    } else {
      for (int i = 0; i < 4; ++i)
        v[i] = first + i < groups_ ? _mm512_load_si512(scales_ + shared(first + i) * 16) : _mm512_setzero_si512();
      if (kLanes == kRowGroups) to_quads(v);
    }
    for (int i = 0; i < 4; ++i) _mm512_store_si512(scales + i * 16, v[i]);
    if (tile_.zero == nullptr) return;
    for (int i = 0; i < 4; ++i) {
      const uint8_t* bytes = zeros_ + shared(first + i < groups_ ? first + i : first) * 16;
      v[i] = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_load_si128((const __m128i*)bytes))));
    }
    if (kLanes == kRowGroups) to_quads(v);
    for (int i = 0; i < 4; ++i) _mm512_store_si512(zeros + i * 16, v[i]);
  }

 private:
  // Index of the scale that group g of 32 uses.
  int64_t shared(int64_t g) const { return step_ == 1 ? g : int64_t(uint32_t(g) / uint32_t(step_)); }

  void load_lines(int64_t count) {
    const int rows = tile_.rows;
    for (int64_t u = 0; u < count; ++u) {
      float* to = scales_ + u * 16;
      if (tile_.scale_dtype == MXK_BF16) {
        const uint8_t* line = tile_.scale + u * tile_.scale_step + tile_.column0 * 2;
        const __m512i v = tile_.column_step == 1
                              ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(__mmask16((1u << rows) - 1), line))
                              : _mm512_maskz_loadu_epi16(__mmask32((uint64_t(1) << (2 * rows - 1)) - 1), line);
        _mm512_store_si512(to, _mm512_slli_epi32(v, 16));
      } else {
        for (int r = 0; r < 16; ++r) to[r] = r < rows ? scale_of(tile_, r, u) : 0.0f;
      }
      special_ |= _mm512_fpclass_ps_mask(_mm512_load_ps(to), kNotFinite);
      if (tile_.zero == nullptr) continue;
      const uint8_t* line = tile_.zero + u * tile_.zero_step;
      __m128i zeros;
      if (tile_.zero_dtype == MXK_U8) {
        const __m256i v = _mm256_maskz_loadu_epi8(__mmask32((uint64_t(1) << (tile_.column_step * (rows - 1) + 1)) - 1),
                                                  line + tile_.column0);
        zeros = tile_.column_step == 1 ? _mm256_castsi256_si128(v) : _mm256_cvtepi16_epi8(v);
      } else {
        const __m128i v = _mm_maskz_loadu_epi8(nibble_bytes(tile_), line + tile_.column0 / 2);
        const __m256i wide = _mm256_cvtepu8_epi16(v);
        const __m128i pairs = _mm256_castsi256_si128(_mm256_or_si256(wide, _mm256_slli_epi16(wide, 4)));
        zeros = tile_.column_step == 1 ? pairs : tile_.column0 & 1 ? _mm_srli_epi16(v, 4) : v;
        zeros = _mm_and_si128(zeros, _mm_set1_epi8(15));
      }
      _mm_store_si128(reinterpret_cast<__m128i*>(zeros_ + u * 16), zeros);
    }
  }

 private:
  const Tile& tile_;
  float* scales_;
  uint8_t* zeros_;
  int64_t groups_, step_;  // groups of 32, and how many of them share a scale
  uint32_t special_ = 0;
};

// ---- weight codes --------------------------------------------------------------------------------------------------

// Unsigned bytes of the 16 codes (Coding of tile.h), four times over: vpermb looks at the low 6 bits of an index, so a
// nibble may have anything above it.
inline __m512i code_table(int64_t format) {
  alignas(16) uint8_t bytes[16];
  for (int code = 0; code < 16; ++code)
    bytes[code] = uint8_t(format == MXK_MXFP4 ? kTwiceE2M1[code] + 12 : format == MXK_INT4 ? code ^ 8 : code);
  return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
}

// The next 64 bytes, or `bytes` if fewer, of each row.
inline void load_rows(const uint8_t* const* rows, int count, int64_t at, int64_t bytes, __m512i* v) {
  if (bytes >= 64) {
    for (int r = 0; r < count; ++r) v[r] = _mm512_loadu_si512(rows[r] + at);
  } else {
    const __mmask64 mask = (uint64_t(1) << bytes) - 1;
    for (int r = 0; r < count; ++r) v[r] = _mm512_maskz_loadu_epi8(mask, rows[r] + at);
  }
}

inline void unpack(__m512i dwords, __m512i table, __m512i* planes) {
  planes[0] = _mm512_permutexvar_epi8(dwords, table);
  planes[1] = _mm512_permutexvar_epi8(_mm512_srli_epi32(dwords, 4), table);
}

// w[4 groups][4 dwords][plane], lanes kRows.
inline void unpack_rows(const uint8_t* const* rows, int64_t at, int64_t bytes, __m512i table, __m512i* w,
                        const Ahead& ahead) {
  __m512i v[16];
  load_rows(rows, 16, at, bytes, v);
  transpose(v);
  for (int i = 0; i < 16; ++i) unpack(v[i], table, w + 2 * i), ahead.ask(i, 1);
}

// w[4 dwords][plane] of the next 64 bytes, or `bytes` if fewer, of a quad of rows; lanes kRowGroups.
inline __attribute__((always_inline)) void unpack_quad(const uint8_t* const* rows, int64_t at, int64_t bytes,
                                                       __m512i table, __m512i* w) {
  __m512i v[4];
  load_rows(rows, 4, at, bytes, v);
  const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
  const __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
  unpack(_mm512_unpacklo_epi64(a, c), table, w);
  unpack(_mm512_unpackhi_epi64(a, c), table, w + 2);
  unpack(_mm512_unpacklo_epi64(b, d), table, w + 4);
  unpack(_mm512_unpackhi_epi64(b, d), table, w + 6);
}

// The same of 16 rows: w[4 quads][4 dwords][plane].
inline void unpack_quads(const uint8_t* const* rows, int64_t at, int64_t bytes, __m512i table, __m512i* w,
                         const Ahead& ahead) {
  for (int q = 0; q < 4; ++q) unpack_quad(rows + 4 * q, at, bytes, table, w + 8 * q), ahead.ask(4 * q, 4);
}

// w[8] of group g from the lines of a transposed matrix: byte j of lane n is line k = 8d + 2j (or + 1) of column n.
inline void unpack_lines(const Tile& tile, int64_t g, __m512i table, __m512i* w) {
  const __mmask16 tail = nibble_bytes(tile);
  const uint8_t* base = tile.weight + g * kGroup * tile.weight_step + tile.column0 / 2;
  const int64_t lines = tile.columns - g * kGroup < kGroup ? tile.columns - g * kGroup : kGroup;
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int d = 0; d < 4; ++d)
    for (int half = 0; half < 2; ++half) {
      const __m512i first = tile.column_step == 1 ? _mm512_srli_epi32(lane, 1) : lane;  // byte of the column in its line
      const __m512i index = _mm512_add_epi32(_mm512_mullo_epi32(first, _mm512_set1_epi32(0x01010101)),
                                             _mm512_set1_epi32(0x30201000));
      __m512i v = _mm512_setzero_si512();
      for (int j = 0; j < 4; ++j) {
        const int k = 8 * d + 2 * j + half;
        if (k >= lines) break;
        const uint8_t* line = base + k * tile.weight_step;
        prefetch(line + kGroup * tile.weight_step);
        const __m128i bytes = _mm_maskz_loadu_epi8(tail, line);
        v = _mm512_mask_broadcast_i32x4(v, __mmask16(15 << 4 * j), bytes);
      }
      v = _mm512_permutexvar_epi8(index, v);
      const __m512i shift = tile.column_step == 1 ? _mm512_slli_epi32(_mm512_and_si512(lane, _mm512_set1_epi32(1)), 2)
                                                  : _mm512_set1_epi32(tile.column0 & 1 ? 4 : 0);
      w[2 * d + half] = _mm512_permutexvar_epi8(_mm512_srlv_epi32(v, shift), table);
    }
}

}  // namespace
