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

inline __m256 pairs(const void* pair) {
  double both;
  std::memcpy(&both, pair, 8);
  return _mm256_castpd_ps(_mm256_set1_pd(both));
}
// The first of two values in the lower 4 lanes, the second in the upper.
inline __m256 halves(const void* pair) {
  return _mm256_permutevar_ps(pairs(pair), _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
}
// Each of two values once, in its half.
inline __m256i one_lane(const void* pair) {
  return _mm256_and_si256(_mm256_castps_si256(pairs(pair)), _mm256_setr_epi32(-1, 0, 0, 0, 0, -1, 0, 0));
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
inline __m256 multiply(__m256 sum, __m256i low, __m256i high, const uint8_t* chunk, const Row& row, int64_t c, int pair) {
  const uint8_t* meta = chunk + Digits * kDigit + pair * 8;
  const __m256i product = products<Digits>(low, high, chunk + pair * 32), correction = one_lane(meta + kMeta);
  __m256 value;
  if (row.zeros)
    value = _mm256_fmadd_ps(halves(row.zeros + c * 4 + pair * 2), _mm256_castsi256_ps(correction), _mm256_cvtepi32_ps(product));
  else
    value = _mm256_cvtepi32_ps(_mm256_add_epi32(product, correction));
  return _mm256_fmadd_ps(_mm256_mul_ps(value, halves(meta)), halves(row.scales + c * 4 + pair * 2), sum);
}

inline float total(__m256 v) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

class Codes {
 public:
  explicit Codes(int64_t format) {
    alignas(16) uint8_t codes[16];
    for (int code = 0; code < 16; ++code)
      codes[code] = uint8_t(format == MXK_MXFP4 ? kTwiceE2M1[code] + 12 : format == MXK_INT4 ? code ^ 8 : code);
    table_ = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(codes)));
  }
  // 32 packed bytes, or `left` if fewer.
  void unpack(const uint8_t* at, int64_t left, __m256i& low, __m256i& high) const {
    __m256i packed;
    if (left >= 32) {
      packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    } else {
      alignas(32) uint8_t tail[32] = {};
      if (left > 0) std::memcpy(tail, at, size_t(left));
      packed = _mm256_load_si256(reinterpret_cast<const __m256i*>(tail));
    }
    const __m256i nibble = _mm256_set1_epi8(15);
    low = _mm256_shuffle_epi8(table_, _mm256_and_si256(packed, nibble));
    high = _mm256_shuffle_epi8(table_, _mm256_and_si256(_mm256_srli_epi16(packed, 4), nibble));
  }

 private:
  __m256i table_;
};

// One vector: its sums stay in registers.
template <int Digits>
inline float multiply_one(const Codes& codes, const Row& row, int64_t bytes, const Vector& x) {
  __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  for (int64_t c = 0; c * 64 < bytes; ++c)
    for (int pair = 0; pair < 2; ++pair) {
      __m256i low, high;
      _mm_prefetch(reinterpret_cast<const char*>(row.weight + c * 64 + 4096), _MM_HINT_T0);
      codes.unpack(row.weight + c * 64 + pair * 32, bytes - c * 64 - pair * 32, low, high);
      sums[pair] = multiply<Digits>(sums[pair], low, high, x.chunks + c * chunk_bytes(Digits), row, c, pair);
    }
  return total(_mm256_add_ps(sums[0], sums[1]));
}

// Several: unpacked once, sums[vector][pair][8] in memory. The same arithmetic.
inline void multiply_many(const Codes& codes, const Row& row, int64_t bytes, const Vector* const* vectors, int count, float* sums) {
  for (int t = 0; t < count * 2; ++t) _mm256_storeu_ps(sums + t * 8, _mm256_setzero_ps());
  for (int64_t c = 0; c * 64 < bytes; ++c)
    for (int pair = 0; pair < 2; ++pair) {
      __m256i low, high;
      codes.unpack(row.weight + c * 64 + pair * 32, bytes - c * 64 - pair * 32, low, high);
      for (int t = 0; t < count; ++t) {
        const Vector& x = *vectors[t];
        float* sum = sums + (t * 2 + pair) * 8;
        if (x.num_digits == 2)
          _mm256_storeu_ps(sum, multiply<2>(_mm256_loadu_ps(sum), low, high, x.chunks + c * chunk_bytes(2), row, c, pair));
        else if (x.num_digits == 3)
          _mm256_storeu_ps(sum, multiply<3>(_mm256_loadu_ps(sum), low, high, x.chunks + c * chunk_bytes(3), row, c, pair));
      }
    }
  for (int t = 0; t < count; ++t)
    sums[t] = total(_mm256_add_ps(_mm256_loadu_ps(sums + t * 16), _mm256_loadu_ps(sums + t * 16 + 8)));
}

// scales[groups], zeros beyond them up to a chunk; returns whether one is out of the ordinary: not finite, or (E8M0) so
// large that a product with some code is not, or the subnormal 2^-127.
inline bool load_scales(const Tile& tile, int r, int64_t groups, float* scales) {
  const uint8_t* line = tile.scale + r * tile.scale_step;
  int64_t g = 0;
  bool special = false;
  if (tile.group == kGroup && tile.scale_dtype == MXK_U8) {
    __m128i odd = _mm_setzero_si128();
    for (; g + 8 <= groups; g += 8) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(line + g));
      const __m128i from1 = _mm_sub_epi8(bytes, _mm_set1_epi8(1));
      odd = _mm_or_si128(odd, _mm_subs_epu8(from1, _mm_set1_epi8(char(251))));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(scales + g), _mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23));
    }
    special = _mm_cvtsi128_si64(odd) != 0;
  } else if (tile.group == kGroup && tile.scale_dtype == MXK_BF16) {
    const __m256i exponent = _mm256_set1_epi32(0x7f800000);
    __m256i odd = _mm256_setzero_si256();
    for (; g + 8 <= groups; g += 8) {
      const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(line + 2 * g));
      const __m256i value = _mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16);
      odd = _mm256_or_si256(odd, _mm256_cmpeq_epi32(_mm256_and_si256(value, exponent), exponent));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(scales + g), value);
    }
    special = _mm256_movemask_epi8(odd) != 0;
  }
  for (; g < groups; ++g) {
    scales[g] = scale_of(tile, r, g * kGroup / tile.group);
    const float size = scales[g] < 0 ? -scales[g] : scales[g];
    special |= tile.scale_dtype == MXK_U8 ? !(size >= 0x1p-126f && size < 0x1p126f) : !(size < __builtin_inff());
  }
  for (; g % 4; ++g) scales[g] = 0.0f;
  return special;
}

void tile_rows(const Tile& tile, const Vector* const* vectors, int count, const TileScratch& scratch, float (*out)[16]) {
  uint32_t special = 0;
  if (tile.transposed) special = 0xffff;
  const int64_t groups = groups_of(tile.columns), padded = chunks_of(tile.columns) * 4, bytes = (tile.columns + 1) / 2;
  float *scales = scratch.scales, *zeros = tile.zero ? scales + padded : nullptr;
  const Codes codes(tile.format);
  for (int r = 0; r < tile.rows && !tile.transposed; ++r) {
    if (load_scales(tile, r, groups, scales)) {
      special |= 1u << r;
      continue;
    }
    for (int64_t g = 0; zeros && g < padded; ++g) zeros[g] = g < groups ? zero_of(tile, r, g * kGroup / tile.group) : 0.0f;
    const Row row = {tile.weight + r * tile.weight_step, scales, zeros};
    if (count == 1 && vectors[0]->num_digits == 2)
      scratch.sums[0] = multiply_one<2>(codes, row, bytes, *vectors[0]);
    else if (count == 1 && vectors[0]->num_digits == 3)
      scratch.sums[0] = multiply_one<3>(codes, row, bytes, *vectors[0]);
    else
      multiply_many(codes, row, bytes, vectors, count, scratch.sums);
    for (int t = 0; t < count; ++t) out[t][r] = scratch.sums[t] + bias_of(tile, r);
  }
  exact_tile(tile, vectors, count, special, scratch, out);
}

void tiles(const Tile* tiles, int num_tiles, const Vector* const* vectors, int count, const TileScratch& scratch,
           float (*const* out)[16]) {
  for (int i = 0; i < num_tiles; ++i) tile_rows(tiles[i], vectors, count, scratch, out[i]);
}

constexpr Isa kIsa = {"avx2", prepare, tiles, activate_rows, nullptr};

}  // namespace

const Isa* isa_avx2() {
  static const bool runs = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return runs ? &kIsa : nullptr;
}
#else
const Isa* isa_avx2() { return nullptr; }
#endif
