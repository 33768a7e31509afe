// Any machine, without a byte shuffle: plain C++ in loops that compilers vectorise (SSE2). What isa_portable.cpp falls
// back on.
//
// A vector's chunk holds its 16-bit integers themselves, int16 [4 groups][32], instead of digits (num_digits 1); vectors
// that would need a third digit take the plain fp32 path. A row is unpacked once, as 16-bit integers with offset and zero
// point already taken off, and multiplied with every vector: products of 16 bits with int32 sums per group of 32.
#include "digits.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

// Sum of 16 products. Written for SSE2: compilers make scalar code of so short a loop.
#if defined(__SSE2__)
using Sums = __m128i;
inline Sums no_sums() { return _mm_setzero_si128(); }
inline Sums add_products(Sums sums, const int16_t* a, const uint8_t* b) {
  const __m128i* x = reinterpret_cast<const __m128i*>(a);
  const __m128i* y = reinterpret_cast<const __m128i*>(b);
  sums = _mm_add_epi32(sums, _mm_madd_epi16(_mm_loadu_si128(x), _mm_loadu_si128(y)));
  return _mm_add_epi32(sums, _mm_madd_epi16(_mm_loadu_si128(x + 1), _mm_loadu_si128(y + 1)));
}
inline int32_t total(Sums sums) {
  sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0xb1)));
}
#else
using Sums = int32_t;
inline Sums no_sums() { return 0; }
inline Sums add_products(Sums sums, const int16_t* a, const uint8_t* b) {
  for (int i = 0; i < 16; ++i) {
    int16_t y;
    std::memcpy(&y, b + 2 * i, 2);
    sums += int32_t(a[i]) * y;
  }
  return sums;
}
inline int32_t total(Sums sums) { return sums; }
#endif

template <class T>
void write_halves(const T* raw, int64_t n, const Coding& coding, uint8_t* to) {
  for (int64_t c = 0; c < chunks_of(n); ++c, to += chunk_bytes(1)) {
    int16_t halves[4][kGroup];
    float units[8] = {};
    for (int g = 0; g < 4; ++g) {  // all of it is read before the chunk is written: it may lie in the same place
      float x[kGroup], scaled[kGroup];
      int32_t integers[kGroup];
      read_group(raw, c * 4 + g, n, x);
      units[g] = to_integers<14>(x, scaled, integers) * coding.unit;
      for (int i = 0; i < kGroup; ++i) halves[g][i] = int16_t(integers[i]);
    }
    std::memcpy(to, halves, sizeof halves);
    std::memcpy(to + sizeof halves, units, sizeof units);
  }
}

template <class T>
void prepare_halves(const T* raw, bool wide, int64_t n, const Coding& coding, uint8_t* memory, Vector* out) {
  const uint32_t most = largest_magnitude(raw, n);
  *out = {raw, wide, 0, memory};
  const int largest = int(most >> 23);
  if (most != 0 && (largest < kSmallest || largest >= kLargest || digits_needed(raw, wide, n, largest) != 2)) return;
  write_halves(raw, n, coding, memory);
  out->num_digits = 1;
}

void prepare_vector(const void* raw, bool wide, int64_t n, const Coding& coding, void* memory, Vector* out) {
  uint8_t* to = static_cast<uint8_t*>(memory);
  if (wide)
    prepare_halves(static_cast<const float*>(raw), wide, n, coding, to, out);
  else
    prepare_halves(static_cast<const uint16_t*>(raw), wide, n, coding, to, out);
}

// Integers of the two codes of a byte, the low nibble's first, with the constant offset of "uint4" taken off: one load and
// one store a byte, where shifts and masks would take ten times that without byte shuffles.
struct Pairs {
  int16_t of[256][2];
  explicit Pairs(const Tile& tile) {
    const int16_t offset = tile.format == MXK_UINT4 && tile.zero == nullptr ? 8 : 0;
    int16_t integers[16];
    for (int code = 0; code < 16; ++code)
      integers[code] = int16_t(tile.format == MXK_MXFP4  ? kTwiceE2M1[code]
                               : tile.format == MXK_INT4 ? (code ^ 8) - 8
                                                         : code - offset);
    for (int byte = 0; byte < 256; ++byte) of[byte][0] = integers[byte & 15], of[byte][1] = integers[byte >> 4];
  }
};

// integers[groups][32] of a row; `zeros` by group, or null.
void unpack_row(const uint8_t* line, int64_t groups, int64_t bytes, const Pairs& pairs, const int16_t* zeros,
                int16_t* integers) {
  for (int64_t i = 0; i < bytes; ++i) std::memcpy(integers + 2 * i, pairs.of[line[i]], 4);
  for (int64_t i = 2 * bytes; i < groups * kGroup; ++i) integers[i] = 0;
  for (int64_t g = 0; zeros && g < groups; ++g)
    for (int i = 0; i < kGroup; ++i) integers[g * kGroup + i] = int16_t(integers[g * kGroup + i] - zeros[g]);
}

float multiply_row(const int16_t* integers, const float* scales, int64_t groups, const Vector& x) {
  float sum = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* chunk = x.chunks + g / 4 * chunk_bytes(1);
    const int16_t* w = integers + g * 32;
    const Sums sums = add_products(add_products(no_sums(), w, chunk + g % 4 * 64), w + 16, chunk + g % 4 * 64 + 32);
    float unit;
    std::memcpy(&unit, chunk + 256 + g % 4 * 4, 4);
    sum += float(total(sums)) * unit * scales[g];
  }
  return sum;
}

void tile_rows(const Tile& tile, const Vector* const* vectors, int count, const TileScratch& scratch, float (*out)[16]) {
  uint32_t special = 0;
  bool integers_used = false;
  for (int t = 0; t < count; ++t) integers_used |= vectors[t]->num_digits == 1;
  if (tile.transposed) special = 0xffff;
  const int64_t groups = groups_of(tile.columns), bytes = (tile.columns + 1) / 2;
  const Pairs pairs(tile);
  float* scales = scratch.scales;
  int16_t* zeros = reinterpret_cast<int16_t*>(scales + groups);
  int16_t* integers = reinterpret_cast<int16_t*>(scales + 2 * groups);
  for (int r = 0; integers_used && !tile.transposed && r < tile.rows; ++r) {
    const uint8_t* scale = tile.scale + r * tile.scale_step;
    if (tile.scale_dtype == MXK_U8 && tile.group == kGroup) {
      for (int64_t g = 0; g < groups; ++g) scales[g] = from_bits(uint32_t(scale[g]) << 23);
    } else {
      for (int64_t g = 0; g < groups; ++g) scales[g] = scale_of(tile, r, g * kGroup / tile.group);
    }
    bool ordinary = true;
    for (int64_t g = 0; g < groups; ++g) {
      const float size = scales[g] < 0 ? -scales[g] : scales[g];
      ordinary &= tile.scale_dtype == MXK_U8 ? size >= 0x1p-126f && size < 0x1p126f : size < __builtin_inff();
    }
    special |= uint32_t(!ordinary) << r;
    for (int64_t g = 0; tile.zero && g < groups; ++g) zeros[g] = int16_t(zero_of(tile, r, g * kGroup / tile.group));
    if (special >> r & 1) continue;
    const uint8_t* line = tile.weight + r * tile.weight_step;
    unpack_row(line, groups, bytes, pairs, tile.zero ? zeros : nullptr, integers);
    for (int t = 0; t < count; ++t)
      if (vectors[t]->num_digits == 1) out[t][r] = multiply_row(integers, scales, groups, *vectors[t]) + bias_of(tile, r);
  }
  exact_tile(tile, vectors, count, special, scratch, out);
}

void tiles(const Tile* tiles, int num_tiles, const Vector* const* vectors, int count, const TileScratch& scratch,
           float (*const* out)[16]) {
  for (int i = 0; i < num_tiles; ++i) tile_rows(tiles[i], vectors, count, scratch, out[i]);
}

constexpr Isa kIsa = {"baseline", prepare_vector, tiles, activate_rows, nullptr};

}  // namespace

const Isa* isa_baseline() { return &kIsa; }
