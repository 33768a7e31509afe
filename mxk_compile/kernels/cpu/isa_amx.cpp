// AMX-BF16 for experts with many rows; everything else as in isa_avx512.cpp.
//
// C[16 output rows][16 columns] fp32 += A[16 rows][32 weights] x B[32 values][16 columns], one group of 32 a step.
// Weights are bf16 exactly (MXFP4: the scale changes the exponent alone) or as two parts (INT4), so are tokens, and an
// intermediate is two columns of 8 significant bits each: products are exact, sums fp32.
// Rows are unpacked into A tiles (amx_unpack.h) a chunk of 4 groups ahead, a few after each product: products take 16 cycles
// and the unpacking hides behind them. Two chunks of A tiles, 16 KiB, are what the first cache bears beside rows and B.
// Sums stay in tile registers for the whole row: one tile of rows times up to 6 strips, or with MXFP4 2 times up to 3. More
// strips unpack the rows again, which costs less than sums that pass through memory.
// Every sum adds up the groups in order, whatever the shape: a result depends on its row and vector only.
#include "tile.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
#include <algorithm>
#include <utility>

#include "amx_tiles.h"
#include "amx_unpack.h"

namespace {

// ---- products ------------------------------------------------------------------------------------------------------

constexpr int64_t kAhead = 3;  // chunks that rows are fetched ahead

template <int Rows, int Cols>
struct Shape {
  static constexpr int kRows = Rows, kCols = Cols;
};

// C[Rows][Cols] += A[Rows][Parts] x B[Cols]; calls between(n) after the n-th product.
template <int Rows, int Cols, int Parts, class F>
inline __attribute__((always_inline)) void multiply_group(const uint8_t* a, const uint8_t* b, int64_t strip, F&& between) {
  constexpr int kSums = Rows * Cols, kFree = 8 - kSums;
  if constexpr (kFree > Cols) {  // B stays in registers
    constexpr int kB = kSums, kA = kSums + Cols;
    unroll<Cols>([&](auto j) { tile_load<kB + j()>(b + j() * strip); });
    unroll<Rows * Parts>([&](auto i) {
      constexpr int kOwn = kA + i() % (kFree - Cols);
      tile_load<kOwn>(a + i() * kTileBytes);
      unroll<Cols>([&](auto j) {
        tile_multiply<i() / Parts * Cols + j(), kOwn, kB + j()>();
        between(std::integral_constant<int, i() * Cols + j()>());
      });
    });
  } else {  // one A; B forth and back, so that the last is still there
    unroll<Rows * Parts>([&](auto i) {
      tile_load<kSums>(a + i() * kTileBytes);
      unroll<Cols>([&](auto n) {
        constexpr int j = i() % 2 ? Cols - 1 - n() : n(), kB = kSums + 1 + j % (kFree - 1);
        if constexpr (i() == 0 || n() > 0) tile_load<kB>(b + j * strip);
        tile_multiply<i() / Parts * Cols + j, kSums, kB>();
        between(std::integral_constant<int, i() * Cols + n()>());
      });
    });
  }
}

// Asks for what the rows of a quarter, or those of the tile that is read next, will read some chunks after c, and for a
// quarter of that tile's scales.
inline void fetch(const Tile& tile, const Tile* next, int64_t c, int quarter, int64_t chunks, int64_t packed, int64_t scales) {
  if (c < 4 && next) {
    const int r = 4 * quarter + int(c);
    const uint8_t* scale = next->scale + (r < next->rows ? r : 0) * next->scale_step;
    for (int64_t i = 0; i < scales; i += 64) prefetch(scale + i);
  }
  const int64_t ahead = c + kAhead;
  const bool beyond = ahead >= chunks;
  const Tile* from = beyond ? next : &tile;
  if (from == nullptr || 4 * quarter + 4 > from->rows) return;
  const int64_t at = (ahead - (beyond ? chunks : 0)) * 64, step = from->weight_step;
  const uint8_t* row = from->weight + (at < packed ? at : 0) + 4 * quarter * step;
  prefetch(row), prefetch(row + step), prefetch(row + 2 * step), prefetch(row + 3 * step);
}

// Sums of Rows tiles and Cols strips. Each product is followed by its share of the rows of the next chunk.
template <class Codec, int Rows, int Cols>
__attribute__((noinline)) void pass(const Codec* codecs, const Tile* tiles, const Tile* const* next, uint8_t* memory,
                                    const uint8_t* strips, int64_t strip, float* sums, int64_t tile_sums) {
  constexpr int kParts = Codec::kParts, kStep = Rows * kParts * kTileBytes;
  constexpr int kProducts = Rows * kParts * Cols, kShare = Rows * kChunkGroups;  // of a group: products, rows to unpack
  static_assert(2 * kChunkGroups * kStep <= kMatrixTileBytes, "two chunks fit");
  const typename Codec::Constants constants = codecs[0].constants();
  const int64_t columns = tiles[0].columns, groups = groups_of(columns), chunks = chunks_of(columns), packed = (columns + 1) / 2;
  const int64_t scales = groups * kGroup / tiles[0].group * dtype_bytes(tiles[0].scale_dtype);
  const int least = Rows == 1 ? tiles[0].rows : std::min(tiles[0].rows, tiles[Rows - 1].rows);
  const auto chunk_at = [&](int64_t c) { return memory + (c & 1) * (kChunkGroups * kStep); };
  const auto unpack = [&](int64_t c) {
    for (int i = 0; i < Rows; ++i) codecs[i].template unpack<kStep>(c, chunk_at(c) + i * kParts * kTileBytes);
  };
  unroll<Rows * Cols>([&](auto t) { tile_zero<t()>(); });
  unpack(0);
  for (int64_t c = 0; c < chunks; ++c) {
    const bool whole = least == kTileRows && packed - (c + 1) * 64 >= 64;
    if (!whole && c + 1 < chunks) unpack(c + 1);
    uint8_t* ahead = chunk_at(c + 1);
    for (int j = 0; j < kChunkGroups && c * kChunkGroups + j < groups; ++j) {
      for (int i = 0; i < Rows; ++i) fetch(tiles[i], next[i], c, j, chunks, packed, scales);
      typename Codec::Place from[Rows];
      for (int i = 0; i < Rows; ++i) from[i] = codecs[i].place(c + 1, 4 * j);
      uint8_t* to = ahead + 4 * j * 64;
      multiply_group<Rows, Cols, kParts>(chunk_at(c) + j * kStep, strips + (c * kChunkGroups + j) * kTileBytes, strip, [&](auto n) {
        constexpr int kFirst = n() * kShare / kProducts, kCount = (n() + 1) * kShare / kProducts - kFirst;
        if (whole)
          unroll<kCount>([&](auto u) {
            constexpr int kRow = kFirst + u(), i = kRow % Rows;
            Codec::template row<kStep>(constants, from[i], kRow / Rows, to + i * kParts * kTileBytes + kRow / Rows * 64);
          });
      });
    }
  }
  unroll<Rows * Cols>([&](auto t) { tile_store<t()>(sums + t() / Cols * tile_sums + t() % Cols * 256); });
}

template <class Codec>
void multiply_rows(const MatrixCall& call, const MatrixScratch& scratch, uint32_t* special) {
  const Tile* tiles = call.tiles;
  Codec codecs[2];
  for (int i = 0; i < call.num_tiles; ++i) special[i] = codecs[i].open(tiles[i], typename Codec::Memory(scratch, i));
  const int64_t strip = strip_bytes(tiles[0].columns), tile_sums = call.num_strips * 256;
  const auto run = [&](auto shape, int i, const Tile* const* next, int s) {
    constexpr int kRows = decltype(shape)::kRows, kCols = decltype(shape)::kCols;
    pass<Codec, kRows, kCols>(codecs + i, tiles + i, next, scratch.tiles, call.strips + s * strip, strip,
                              scratch.sums + i * tile_sums + s * 256, tile_sums);
  };
  if constexpr (Codec::kParts == 1)  // two tiles of two parts: measured slower than one after the other
    if (call.num_tiles == 2 && call.num_strips <= 3) {
      const Tile* next[] = {tiles[0].next, tiles[1].next};
      if (call.num_strips == 1) run(Shape<2, 1>(), 0, next, 0);
      if (call.num_strips == 2) run(Shape<2, 2>(), 0, next, 0);
      if (call.num_strips == 3) run(Shape<2, 3>(), 0, next, 0);
      return;
    }
  const int passes = (call.num_strips + 5) / 6;
  for (int i = 0; i < call.num_tiles; ++i)
    for (int p = 0, s = 0, count; p < passes; ++p, s += count) {
      count = (call.num_strips - s) / (passes - p);
      const Tile* next = p + 1 < passes ? &tiles[i] : i + 1 < call.num_tiles ? &tiles[i + 1] : tiles[0].next;
      if (count == 1) run(Shape<1, 1>(), i, &next, s);
      if (count == 2) run(Shape<1, 2>(), i, &next, s);
      if (count == 3) run(Shape<1, 3>(), i, &next, s);
      if (count == 4) run(Shape<1, 4>(), i, &next, s);
      if (count == 5) run(Shape<1, 5>(), i, &next, s);
      if (count == 6) run(Shape<1, 6>(), i, &next, s);
    }
}

// ---- what the unit does not compute as exact.h does ------------------------------------------------------------------

// A route's intermediate out of its strip.
void read_intermediate(const uint8_t* strip, int column, int64_t n, float* to) {
  for (int64_t k = 0; k < n; ++k) {
    const int in_group = int(k % kGroup), l = in_group % 4, w = in_group / 4;
    const uint8_t* at = strip + k / kGroup * kTileBytes + (4 * l + w / 2) * 64 + column * 4 + w % 2 * 2;
    uint16_t upper, lower;
    std::memcpy(&upper, at, 2);
    std::memcpy(&lower, at + kStripRoutes * 4, 2);
    to[k] = from_bf16(upper) + from_bf16(lower);
  }
}

// Some rows of one tile for vectors, in place of the unit's sums.
void mend_tile(const MatrixCall& call, int tile, const MatrixScratch& scratch, const Vector* const* vectors, int count,
               int first, uint32_t special) {
  TileScratch exact = {};
  exact.row = scratch.row;
  Tile unbiased = call.tiles[tile];
  unbiased.bias = nullptr;
  float out[kStripTokens][16];
  exact_tile(unbiased, vectors, count, special, exact, out);
  for (int t = 0; t < count; ++t) {
    const uint32_t rows = vectors[t]->num_digits == 0 ? 0xffffu : special;
    const int in_strip = call.tokens ? kStripTokens : kStripRoutes, strip = (first + t) / in_strip;
    float* sums = scratch.sums + (int64_t(tile) * call.num_strips + strip) * 256 + (first + t) % in_strip;
    for (int r = 0; r < unbiased.rows; ++r) {
      if (!(rows >> r & 1)) continue;
      sums[r * 16] = out[t][r];
      if (!call.tokens) sums[r * 16 + kStripRoutes] = 0;
    }
  }
}

__attribute__((noinline)) void mend(const MatrixCall& call, const MatrixScratch& scratch, const uint32_t* special) {
  const int64_t n = call.tiles[0].columns;
  for (int s = 0; s < call.num_strips; ++s) {
    if (call.tokens) {
      const int first = s * kStripTokens, left = call.columns - first;
      for (int i = 0; i < call.num_tiles; ++i)
        mend_tile(call, i, scratch, call.tokens + first, left < kStripTokens ? left : kStripTokens, first, special[i]);
      continue;
    }
    for (int column = 0; column < kStripRoutes && s * kStripRoutes + column < call.columns; ++column) {
      const bool all = call.exact[s] >> column & 1;
      if (!all && (special[0] | special[1]) == 0) continue;
      read_intermediate(call.strips + s * strip_bytes(n), column, n, scratch.column);
      const Vector vector = {scratch.column, true, all ? 0 : -1, nullptr}, *pointer = &vector;
      for (int i = 0; i < call.num_tiles; ++i)
        mend_tile(call, i, scratch, &pointer, 1, s * kStripRoutes + column, special[i]);
    }
  }
}

template <class Codec>
void multiply_as(const MatrixCall& call, const MatrixScratch& scratch) {
  uint32_t special[2] = {};
  multiply_rows<Codec>(call, scratch, special);
  bool any = (special[0] | special[1]) != 0;
  for (int s = 0; s < call.num_strips; ++s) any |= call.exact[s] != 0;
  if (any) mend(call, scratch, special);
}

void multiply(const MatrixCall& call, const MatrixScratch& scratch) {
  if (call.tiles[0].format == MXK_MXFP4)
    multiply_as<Mxfp4>(call, scratch);
  else if (call.tiles[0].zero)
    multiply_as<Int4<true>>(call, scratch);
  else
    multiply_as<Int4<false>>(call, scratch);
}

// ---- tokens --------------------------------------------------------------------------------------------------------

inline __mmask32 lanes_of(int64_t left) { return left >= 32 ? 0xffffffffu : (1u << left) - 1; }

// Zeros and magnitudes from 2^-64 to below 2^90.
bool accepts(const uint8_t* x, int64_t n) {
  const uint16_t* values = reinterpret_cast<const uint16_t*>(x);
  __mmask32 odd = 0;
  for (int64_t k = 0; k < n; k += 32) {
    const __m512i size =
        _mm512_and_si512(_mm512_maskz_loadu_epi16(lanes_of(n - k), values + k), _mm512_set1_epi16(0x7fff));
    odd |= _mm512_cmpge_epu16_mask(size, _mm512_set1_epi16(kLargest << 7)) |
           _mm512_mask_cmplt_epu16_mask(_mm512_test_epi16_mask(size, size), size, _mm512_set1_epi16(kLeastExponent << 7));
  }
  return odd == 0;
}

// Absent tokens and values are zero.
uint16_t pack(const uint8_t* const* tokens, int count, int64_t n, uint8_t* strip) {
  alignas(64) uint16_t order[32];
  for (int l = 0; l < 4; ++l)
    for (int w = 0; w < 8; ++w) order[8 * l + w] = uint16_t(4 * w + l);
  const __m512i index = _mm512_load_si512(order);
  for (int64_t g = 0; g < groups_of(n); ++g) {
    __m512i v[16];
    for (int t = 0; t < 16; ++t)
      v[t] = t < count ? _mm512_permutexvar_epi16(
                             index, _mm512_maskz_loadu_epi16(lanes_of(n - g * kGroup), tokens[t] + g * kGroup * 2))
                       : _mm512_setzero_si512();
    transpose(v);
    for (int p = 0; p < 16; ++p) _mm512_store_si512(strip + g * kTileBytes + p * 64, v[p]);
  }
  uint32_t refused = 0;
  for (int t = 0; t < count; ++t) refused |= uint32_t(!accepts(tokens[t], n)) << t;
  return uint16_t(refused);
}

// ---- the intermediate ----------------------------------------------------------------------------------------------

// Upper and lower parts of two values of 16 routes, as pairs; the lower part of inf and NaN is zero.
inline void split_pair(__m512 first, __m512 second, __m512i& upper, __m512i& lower) {
  const __m512i upper_bits = _mm512_set1_epi32(int(0xffff0000)), half = _mm512_set1_epi32(0x8000);
  const auto rest = [&](__m512 v) {
    const __m512 upper_part = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), upper_bits));
    const __mmask16 finite = __mmask16(~_mm512_fpclass_ps_mask(v, kNotFinite));
    return _mm512_add_epi32(_mm512_castps_si512(_mm512_maskz_sub_ps(finite, v, upper_part)), half);
  };
  const auto join = [&](__m512i a, __m512i b) {
    return _mm512_or_si512(_mm512_and_si512(b, upper_bits), _mm512_srli_epi32(a, 16));
  };
  upper = join(_mm512_castps_si512(first), _mm512_castps_si512(second));
  lower = join(rest(first), rest(second));
}

void activate(const Activation& activation, const MatrixCall& call, int64_t step, bool end, int64_t n,
              uint8_t* strips, const MatrixScratch& scratch) {
  const int64_t tile_sums = call.num_strips * 256, strip = strip_bytes(n);
  const int rows = call.tiles[0].rows;
  float bias[2][16] = {};
  for (int i = 0; i < 2; ++i)
    for (int r = 0; r < rows; ++r) bias[i][r] = bias_of(call.tiles[i], r);
  uint8_t* group = strips + step / 2 * kTileBytes;
  const int half = int(step % 2);
  for (int s = 0; s < call.num_strips; ++s) {
    alignas(64) float gate[16][16], up[16][16], h[16][16];
    float* to[16];
    for (int r = 0; r < 16; ++r) {
      const float* sums = scratch.sums + s * 256 + r * 16;
      _mm512_store_ps(gate[r], _mm512_add_ps(_mm512_load_ps(sums), _mm512_set1_ps(bias[0][r])));
      _mm512_store_ps(up[r], _mm512_add_ps(_mm512_load_ps(sums + tile_sums), _mm512_set1_ps(bias[1][r])));
      to[r] = h[r];
    }
    activate_rows(activation, gate, up, rows, 16, to);
    for (int r = rows; r < 16; ++r) _mm512_store_ps(h[r], _mm512_setzero_ps());
    const bool second = s * kStripTokens + kStripRoutes < call.columns;
    const auto store = [&](int row, __m512i upper, __m512i lower) {
      uint8_t* at = group + 2 * s * strip + row * 64;
      _mm512_store_si512(at, _mm512_shuffle_i64x2(upper, lower, 0x44));
      if (second) _mm512_store_si512(at + strip, _mm512_shuffle_i64x2(upper, lower, 0xee));
    };
    for (int a = 0; a < 2; ++a)
      for (int l = 0; l < 4; ++l) {
        __m512i upper, lower;
        split_pair(_mm512_load_ps(h[8 * a + l]), _mm512_load_ps(h[8 * a + 4 + l]), upper, lower);
        store(4 * l + 2 * half + a, upper, lower);
        if (end && half == 0) store(4 * l + 2 + a, _mm512_setzero_si512(), _mm512_setzero_si512());
      }
  }
}

uint16_t tiny(const uint8_t* strip, int64_t n) {
  __m512i most = _mm512_setzero_si512();
  for (int64_t at = 0; at < strip_bytes(n); at += 64)
    most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_load_si512(strip + at), _mm512_set1_epi16(0x7fff)));
  most = _mm512_max_epi32(_mm512_and_si512(most, _mm512_set1_epi32(0xffff)), _mm512_srli_epi32(most, 16));
  return uint16_t(0xff & _mm512_mask_cmplt_epi32_mask(_mm512_test_epi32_mask(most, most), most, _mm512_set1_epi32(kLeastExponent << 7)));
}

void join(const MatrixCall& call, int tile, const MatrixScratch& scratch, float (*out)[16]) {
  alignas(64) float bias[16] = {};
  for (int r = 0; r < call.tiles[tile].rows; ++r) bias[r] = bias_of(call.tiles[tile], r);
  for (int s = 0; s < call.num_strips; ++s) {
    const float* sums = scratch.sums + (int64_t(tile) * call.num_strips + s) * 256;
    __m512i v[16];
    for (int r = 0; r < 16; ++r) {
      const __m512 row = _mm512_load_ps(sums + r * 16);
      v[r] = _mm512_castps_si512(_mm512_add_ps(row, _mm512_shuffle_f32x4(row, row, 0xee)));
    }
    transpose(v);
    const int left = call.columns - s * kStripRoutes;
    for (int t = 0; t < kStripRoutes && t < left; ++t)
      _mm512_storeu_ps(out[s * kStripRoutes + t], _mm512_add_ps(_mm512_castsi512_ps(v[t]), _mm512_load_ps(bias)));
  }
}

// Crossovers: measured (docs/performance/cpu.md).
constexpr MatrixUnit kUnit = {{5, 7, 7}, tiles_begin, tiles_end, pack, multiply, activate, tiny, join};

}  // namespace

const Isa* isa_amx() {
  static const bool runs = isa_avx512() != nullptr && tiles_available();
  if (!runs) return nullptr;  // before the copy, which this unit's flags make AVX-512 of
  static const Isa kIsa = [] {
    Isa isa = *isa_avx512();
    isa.name = "amx", isa.matrix = &kUnit;
    return isa;
  }();
  return &kIsa;
}
#else
const Isa* isa_amx() { return nullptr; }
#endif
