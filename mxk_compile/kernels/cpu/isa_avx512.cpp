// AVX-512 with VBMI and VNNI (Ice Lake and later, Zen 4 and later).
//
// A tile is 16 output rows, one per int32 lane. 64 packed bytes of each row are transposed as 16 x 16 dwords, so that
// one register holds 8 codes of every row; vpermb turns its low and high nibbles into unsigned bytes (the table stands
// in it four times, so nibbles need no mask), and vpdpbusd multiplies them with a token's digits, broadcast from
// memory. After 4 dwords = 32 columns the int32 sums of the digits are joined, made fp32 and scaled. Unpacking costs 34
// instructions per 256 packed bytes whatever the number of tokens; a token adds 21 (2 digits) or 31 (3).
// vdpbf16ps, the obvious choice, has an eighth of the rate of vpdpbusd here (docs/performance/cpu.md).
#include "exact.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
#include <immintrin.h>

namespace {

// ---- activations ---------------------------------------------------------------------------------------------------

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
    const GroupMeta meta = {unit * coding.unit,
                            -coding.offset * _mm512_reduce_add_epi32(_mm512_add_epi32(integers[0], integers[1]))};
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

// ---- weights -------------------------------------------------------------------------------------------------------

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

inline __m512i code_table(const Tile& tile) {
  alignas(64) uint8_t table[64];
  for (int i = 0; i < 64; ++i) {
    const int code = i & 15;
    table[i] = uint8_t(tile.format == MXK_MXFP4 ? kTwiceE2M1[code] + 12 : tile.format == MXK_INT4 ? code ^ 8 : code);
  }
  return _mm512_load_si512(table);
}

// 16 scales of one row from group `first` on as fp32; `left` groups exist. Sets `special` if one of them is not an
// ordinary number: E8M0 0, 253, 254 (times 6 leaves the range), 255; inf and NaN of the others.
inline __m512i scale_values(const uint8_t* row, int64_t dtype, int64_t first, int64_t left, bool* special) {
  const __mmask16 mask = left >= 16 ? 0xffff : (1u << left) - 1;
  if (dtype == MXK_U8) {
    const __m128i bytes = _mm_maskz_loadu_epi8(mask, row + first);
    *special |= _mm_mask_cmpgt_epu8_mask(mask, _mm_sub_epi8(bytes, _mm_set1_epi8(1)), _mm_set1_epi8(char(251))) != 0;
    return _mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23);
  }
  __m512 value;
  if (dtype == MXK_F32)
    value = _mm512_maskz_loadu_ps(mask, row + 4 * first);
  else {
    const __m256i halves = _mm256_maskz_loadu_epi16(mask, row + 2 * first);
    value = dtype == MXK_F16 ? _mm512_cvtph_ps(halves)
                             : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
  *special |= _mm512_fpclass_ps_mask(value, 0x99) != 0;  // quiet and signalling NaN, both infinities
  return _mm512_castps_si512(value);
}

// scratch.scales[group of 32][row] (and zero points behind them); returns the rows with special scales.
inline uint32_t load_scales(const Tile& tile, const TileScratch& scratch) {
  const int64_t groups = groups_of(tile.columns);
  uint32_t special = 0;
  if (tile.group == kGroup) {
    for (int64_t first = 0; first < groups; first += 16) {
      __m512i v[16];
      for (int r = 0; r < 16; ++r) {
        bool odd = false;
        v[r] = r < tile.rows ? scale_values(tile.scale + r * tile.scale_step, tile.scale_dtype, first, groups - first, &odd)
                             : _mm512_setzero_si512();
        special |= uint32_t(odd) << r;
      }
      transpose(v);
      for (int i = 0; i < 16 && first + i < groups; ++i) _mm512_store_si512(scratch.scales + (first + i) * 16, v[i]);
    }
  } else {
    for (int r = 0; r < tile.rows; ++r) {
      for (int64_t g = 0; g < groups; ++g) {
        const float value = scale_of(tile, r, g * kGroup / tile.group);
        special |= uint32_t((to_bits(value) & 0x7f800000u) == 0x7f800000u) << r;
        scratch.scales[g * 16 + r] = value;
      }
    }
  }
  if (tile.zero)
    for (int r = 0; r < tile.rows; ++r)
      for (int64_t g = 0; g < groups; ++g)
        scratch.scales[(groups + g) * 16 + r] = zero_of(tile, r, g * kGroup / tile.group);
  return special;
}

// One group of 32 columns for Count vectors of Digits digits: out[t] += sum * scales. records: of vector 0's group.
template <int Digits, int Count, bool Zero>
inline __attribute__((always_inline)) void multiply(const __m512i (&w)[8], const Vector* const* vectors, int64_t g,
                                                    __m512 scales, __m512 zeros, float* const* out) {
  __m512i sums[Digits][Count];
  const uint8_t* records[Count];
  int32_t four;
  for (int t = 0; t < Count; ++t) {
    records[t] = vectors[t]->records + g * record_bytes(Digits);
    for (int d = 0; d < Digits - 1; ++d) sums[d][t] = _mm512_setzero_si512();
    std::memcpy(&four, records[t] + Digits * kGroup + offsetof(GroupMeta, correction), 4);
    sums[Digits - 1][t] = Zero ? _mm512_setzero_si512() : _mm512_set1_epi32(four);
  }
  for (int i = 0; i < 8; ++i)
    for (int t = 0; t < Count; ++t)
      for (int d = 0; d < Digits; ++d) {
        std::memcpy(&four, records[t] + d * kGroup + i * 4, 4);
        sums[d][t] = _mm512_dpbusd_epi32(sums[d][t], w[i], _mm512_set1_epi32(four));
      }
  for (int t = 0; t < Count; ++t) {
    GroupMeta meta;
    std::memcpy(&meta, records[t] + Digits * kGroup, sizeof meta);
    __m512i sum = sums[0][t];
    for (int d = 1; d < Digits; ++d) sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 8), sums[d][t]);
    __m512 value = _mm512_cvtepi32_ps(sum);
    if (Zero) value = _mm512_fmadd_ps(zeros, _mm512_set1_ps(float(meta.correction)), value);
    value = _mm512_mul_ps(value, _mm512_set1_ps(meta.scale));
    _mm512_store_ps(out[t], _mm512_fmadd_ps(value, scales, _mm512_load_ps(out[t])));
  }
}

template <int Digits, bool Zero>
inline __attribute__((always_inline)) void multiply_all(const __m512i (&w)[8], const Vector* const* vectors,
                                                        float* const* out, int count, int64_t g, __m512 scales,
                                                        __m512 zeros) {
  int t = 0;
  for (; t + 4 <= count; t += 4) multiply<Digits, 4, Zero>(w, vectors + t, g, scales, zeros, out + t);
  if (count - t >= 2) multiply<Digits, 2, Zero>(w, vectors + t, g, scales, zeros, out + t), t += 2;
  if (t < count) multiply<Digits, 1, Zero>(w, vectors + t, g, scales, zeros, out + t);
}

template <bool Zero>
void tile_loop(const Tile& tile, const Vector* const* two, float* const* out_two, int count_two,
               const Vector* const* three, float* const* out_three, int count_three, const TileScratch& scratch) {
  const int64_t groups = groups_of(tile.columns), bytes = (tile.columns + 1) / 2;
  const __m512i table = code_table(tile);
  const uint8_t* rows[16];
  for (int r = 0; r < 16; ++r) rows[r] = tile.weight + (r < tile.rows ? r : 0) * tile.weight_step;
  const char *ahead = reinterpret_cast<const char*>(tile.ahead[0]), *ahead_end = ahead + tile.ahead_bytes[0];
  const char *ahead_scale = reinterpret_cast<const char*>(tile.ahead[1]), *ahead_scale_end = ahead_scale + tile.ahead_bytes[1];
  alignas(64) __m512i packed[16];
  for (int64_t at = 0; at < bytes; at += 64) {
    __m512i v[16];
    if (bytes - at >= 64) {
      for (int r = 0; r < 16; ++r) v[r] = _mm512_loadu_si512(rows[r] + at);
    } else {
      const __mmask64 mask = (uint64_t(1) << (bytes - at)) - 1;
      for (int r = 0; r < 16; ++r) v[r] = _mm512_maskz_loadu_epi8(mask, rows[r] + at);
    }
    for (int i = 0; i < 16 && ahead < ahead_end; ++i, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T0);
    for (int i = 0; i < 4 && ahead_scale < ahead_scale_end; ++i, ahead_scale += 64) _mm_prefetch(ahead_scale, _MM_HINT_T0);
    transpose(v);
    for (int i = 0; i < 16; ++i) packed[i] = v[i];
    const int64_t first = at / 16;
    for (int64_t g = first; g < first + 4 && g < groups; ++g) {
      __m512i w[8];
      for (int d = 0; d < 4; ++d) {
        const __m512i dword = packed[(g - first) * 4 + d];
        w[2 * d] = _mm512_permutexvar_epi8(dword, table);
        w[2 * d + 1] = _mm512_permutexvar_epi8(_mm512_srli_epi32(dword, 4), table);
      }
      const __m512 scales = _mm512_load_ps(scratch.scales + g * 16);
      const __m512 zeros = Zero ? _mm512_load_ps(scratch.scales + (groups + g) * 16) : _mm512_setzero_ps();
      multiply_all<2, Zero>(w, two, out_two, count_two, g, scales, zeros);
      if (count_three) multiply_all<3, Zero>(w, three, out_three, count_three, g, scales, zeros);
    }
  }
}

void tile_rows(const Tile& tile, const Vector* const* vectors, int count, const TileScratch& scratch, float (*out)[16]) {
  alignas(64) float bias[16] = {};
  for (int r = 0; r < tile.rows; ++r) bias[r] = bias_of(tile, r);
  const Vector* two[kTileTokens];
  const Vector* three[kTileTokens];
  float *out_two[kTileTokens], *out_three[kTileTokens];
  int count_two = 0, count_three = 0;
  for (int t = 0; t < count; ++t) {
    std::memcpy(out[t], bias, sizeof bias);
    if (vectors[t]->num_digits == 2) two[count_two] = vectors[t], out_two[count_two++] = out[t];
    if (vectors[t]->num_digits == 3) three[count_three] = vectors[t], out_three[count_three++] = out[t];
  }
  uint32_t special = 0;
  if (count_two + count_three && !tile.transposed) {
    special = load_scales(tile, scratch);
    if (tile.zero)
      tile_loop<true>(tile, two, out_two, count_two, three, out_three, count_three, scratch);
    else
      tile_loop<false>(tile, two, out_two, count_two, three, out_three, count_three, scratch);
  }
  if (tile.transposed) special = 0xffff;
  exact_tile(tile, vectors, count, special, scratch, out);
}

constexpr Isa kIsa = {"avx512", prepare, tile_rows, activate_rows};

}  // namespace

const Isa* isa_avx512() {
  static const bool runs = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
  return runs ? &kIsa : nullptr;
}
#else
const Isa* isa_avx512() { return nullptr; }
#endif
