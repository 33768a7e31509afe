// AVX2 with FMA (Haswell and later, every Zen).
//
// One output row at a time, in steps of 32 packed bytes = 2 groups of 32 columns, one in each half of a register. The
// low nibbles of a group's 16 bytes are its even columns and the high ones its odd: vpshufb turns them into unsigned
// bytes, vpmaddubsw multiplies them with a vector's digits (2 products of 24 * 128 fit 16 bits, and so do the 2 planes'
// sums), and vpmaddwd by 256 and 1 joins the digits in int32. Four fp32 sums a group are added up at the row's end.
// Transposed weights take the plain path.
#include "digits.h"

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>

namespace {

constexpr int kMeta = 16;  // bytes from the units to the corrections of a chunk

// a in the lower 4 lanes, b in the upper.
inline __m256 halves(const float* pair) {
  return _mm256_insertf128_ps(_mm256_broadcast_ss(pair), _mm_broadcast_ss(pair + 1), 1);
}

// The first lane of each half, zero in the others.
inline __m256i first_lanes(const uint8_t* pair) {
  int64_t both;
  std::memcpy(&both, pair, 8);
  return _mm256_cvtepu32_epi64(_mm_cvtsi64_si128(both));  // 64-bit lanes 0 and 1: they stand in the lower half
}

template <int Digits>
inline __m256i products(__m256i low, __m256i high, const uint8_t* digits) {
  __m256i sum = _mm256_setzero_si256();
  for (int d = 0; d < Digits; ++d) {
    const __m256i even = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(digits + d * kDigit));
    const __m256i odd = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(digits + d * kDigit + kPlane));
    const __m256i both = _mm256_add_epi16(_mm256_maddubs_epi16(low, even), _mm256_maddubs_epi16(high, odd));
    if (Digits == 3 && d == 0)  // 65536 does not fit a 16-bit factor
      sum = _mm256_slli_epi32(_mm256_madd_epi16(both, _mm256_set1_epi16(256)), 8);
    else
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(both, _mm256_set1_epi16(d == Digits - 1 ? 1 : 256)));
  }
  return sum;
}

struct Row {
  const uint8_t* weight;
  const float* scales;  // by group, padded with zeros to chunks
  const float* zeros;   // the same; null: none
};

// sum += the row's 2 groups at `pair` of chunk c times one vector.
template <int Digits>
inline __m256 multiply(__m256 sum, __m256i low, __m256i high, const Vector& x, const Row& row, int64_t c, int pair) {
  const uint8_t* chunk = x.chunks + c * chunk_bytes(Digits);
  const uint8_t* meta = chunk + Digits * kDigit + pair * 8;
  const __m256i product = products<Digits>(low, high, chunk + pair * 32);
  // [0, 1] of 64-bit lanes -> [0, 2]: one correction in each half.
  const __m256i correction = _mm256_permute4x64_epi64(first_lanes(meta + kMeta), 0xd8);
  float units[2];
  std::memcpy(units, meta, 8);
  __m256 value;
  if (row.zeros)
    value = _mm256_fmadd_ps(halves(row.zeros + c * 4 + pair * 2), _mm256_castsi256_ps(correction), _mm256_cvtepi32_ps(product));
  else
    value = _mm256_cvtepi32_ps(_mm256_add_epi32(product, correction));
  return _mm256_fmadd_ps(_mm256_mul_ps(value, halves(units)), halves(row.scales + c * 4 + pair * 2), sum);
}

inline float total(__m256 v) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

void multiply_row(const Tile& tile, const Row& row, const Vector* const* vectors, int count, float* sums) {
  const int64_t bytes = (tile.columns + 1) / 2;
  alignas(16) uint8_t codes[16];
  for (int code = 0; code < 16; ++code)
    codes[code] = uint8_t(tile.format == MXK_MXFP4 ? kTwiceE2M1[code] + 12 : tile.format == MXK_INT4 ? code ^ 8 : code);
  const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(codes)));
  const __m256i nibble = _mm256_set1_epi8(15);
  for (int t = 0; t < count; ++t) _mm256_storeu_ps(sums + t * 8, _mm256_setzero_ps());
  for (int64_t at = 0; at < bytes; at += 32) {
    __m256i packed;
    if (bytes - at >= 32) {
      packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row.weight + at));
    } else {
      alignas(32) uint8_t tail[32] = {};
      std::memcpy(tail, row.weight + at, size_t(bytes - at));
      packed = _mm256_load_si256(reinterpret_cast<const __m256i*>(tail));
    }
    const __m256i low = _mm256_shuffle_epi8(table, _mm256_and_si256(packed, nibble));
    const __m256i high = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(packed, 4), nibble));
    const int64_t c = at / 64;
    const int pair = int(at / 32 & 1);
    for (int t = 0; t < count; ++t) {
      if (vectors[t]->num_digits == 0) continue;
      const __m256 sum = _mm256_loadu_ps(sums + t * 8);
      _mm256_storeu_ps(sums + t * 8, vectors[t]->num_digits == 2
                                         ? multiply<2>(sum, low, high, *vectors[t], row, c, pair)
                                         : multiply<3>(sum, low, high, *vectors[t], row, c, pair));
    }
  }
}

void tile_rows(const Tile& tile, const Vector* const* vectors, int count, const TileScratch& scratch, float (*out)[16]) {
  uint32_t special = 0;
  if (tile.transposed) {
    special = 0xffff;
  } else {
    const int64_t groups = groups_of(tile.columns), padded = chunks_of(tile.columns) * 4;
    float* zeros = scratch.scales + padded;
    for (int r = 0; r < tile.rows; ++r) {
      for (int64_t g = 0; g < padded; ++g) {
        const float scale = g < groups ? scale_of(tile, r, g * kGroup / tile.group) : 0.0f;
        scratch.scales[g] = scale;
        // Not finite, or (E8M0) so large that a product with some code is not, or the subnormal 2^-127.
        const float size = scale < 0 ? -scale : scale;
        const bool ordinary = tile.scale_dtype == MXK_U8 ? size < 0x1p126f && (size >= 0x1p-126f || g >= groups)
                                                         : size < __builtin_inff();
        special |= uint32_t(!ordinary) << r;
        if (tile.zero) zeros[g] = g < groups ? zero_of(tile, r, g * kGroup / tile.group) : 0.0f;
      }
      if (special >> r & 1) continue;
      const Row row = {tile.weight + r * tile.weight_step, scratch.scales, tile.zero ? zeros : nullptr};
      multiply_row(tile, row, vectors, count, scratch.sums);
      for (int t = 0; t < count; ++t) out[t][r] = total(_mm256_loadu_ps(scratch.sums + t * 8)) + bias_of(tile, r);
    }
  }
  exact_tile(tile, vectors, count, special, scratch, out);
}

constexpr Isa kIsa = {"avx2", prepare, tile_rows, activate_rows};

}  // namespace

const Isa* isa_avx2() {
  static const bool runs = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return runs ? &kIsa : nullptr;
}
#else
const Isa* isa_avx2() { return nullptr; }
#endif
