// AVX-512 with VBMI and VNNI (Ice Lake and later, Zen 4 and later).
//
// A tile is 16 output rows; a step takes 64 packed bytes of each, 4 groups of 32 columns. Rows are transposed by dwords
// so that a register holds 8 codes of one group for each lane, vpermb turns low and high nibbles into unsigned bytes,
// and vpdpbusd multiplies them with a vector's digits. After 8 of these the int32 sums of the digits are joined, made
// fp32 and scaled. Two ways to share the lanes (Lanes):
//   kRowGroups  a quad of rows in the step's 4 groups. Half the shuffles, which all need one port; the digits take a
//               shuffle per 4 dot products. For few vectors, which wait for memory or for that port. For one vector rows
//               are not transposed at all: their lanes are joined when a quad's dot products are done.
//   kRows       one group of 16 rows. Digits are broadcast from memory, for two tiles at once. For many vectors.
// Both add up a row's groups g, g + 4, g + 8, ... in four fp32 sums and join them in one order: results are the same.
// vdpbf16ps, the obvious choice, has an eighth of the rate of vpdpbusd here (docs/performance/cpu.md).
#include "tile.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
#include "avx512_multiply.h"
#include "avx512_prepare.h"

namespace {

// ---- tiles ---------------------------------------------------------------------------------------------------------

// How many chunks ahead rows are fetched into the first cache, which they must reach but not crowd, and how many more into
// the second: measured.
constexpr int64_t kAhead = 4, kPairAhead = 3, kSecondAhead = 8;

// The lines that `tile`, or `next` after it, will read some chunks after c; asks for the next tile's scales.
inline Ahead fetch(const Tile& tile, const Tile* next, int64_t c, int64_t chunks, int64_t ahead) {
  if (next != nullptr && c < next->rows) {
    const uint8_t* scale = next->scale + c * next->scale_step;
    const int64_t bytes = groups_of(tile.columns) * kGroup / tile.group * dtype_bytes(tile.scale_dtype);
    for (int64_t i = 0; i < bytes; i += 64) prefetch(scale + i);
  }
  const auto lines = [&](int64_t at) -> Lines {
    const bool beyond = at >= chunks;
    const Tile& from = beyond && next != nullptr ? *next : tile;
    return {from.weight + (at - (beyond ? chunks : 0)) * 64, from.weight_step, from.rows - 1};
  };
  return {lines(c + ahead), lines(c + ahead + kSecondAhead)};
}

// Sums of the tiles for all vectors, and the rows that need exact.h. `next`: what is read after a single tile.
template <Lanes kLanes, bool Single, int Tiles, bool Zero>
__attribute__((noinline)) void tile_loop(const Tile* tiles, const Batch& two, const Batch& three, const TileScratch& scratch,
                                         const Tile* next, uint32_t* special) {
  const Tile& tile = tiles[0];
  const int64_t groups = groups_of(tile.columns), bytes = (tile.columns + 1) / 2;
  const __m512i table = code_table(tile.format);
  const uint8_t* rows[Tiles][16];
  for (int i = 0; i < Tiles; ++i)
    for (int r = 0; r < 16; ++r) rows[i][r] = tiles[i].weight + (r < tile.rows ? r : 0) * tile.weight_step;
  const int64_t chunks = chunks_of(tile.columns), capacity = scales_capacity(tile.columns) * 16;
  const auto scales_of = [&](int i) {
    return Scales<kLanes>(tiles[i], scratch.scales + i * capacity, scratch.zeros + i * capacity);
  };
  const Scales<kLanes> first = scales_of(0), second = Tiles == 2 ? scales_of(1) : first;
  alignas(64) __m512i w[Tiles][32];
  alignas(64) float scales[Tiles][4 * 16], zeros[Tiles][4 * 16];
  for (int64_t c = 0; c < chunks; ++c) {
    Ahead ahead[Tiles];
    for (int i = 0; i < Tiles; ++i) {
      if (!tile.transposed)
        ahead[i] = fetch(tiles[i], Tiles == 2 ? tiles[i].next : next, c, chunks, Tiles == 2 ? kPairAhead : kAhead);
      (i ? second : first).get(4 * c, scales[i], zeros[i]);
    }
    if (Single) {
      if (two.count)
        multiply_single<2, Zero>(rows[0], c, bytes, table, *two.vectors[0], scales[0], zeros[0], two.sums[0],
                                 ahead[0]);
      else
        multiply_single<3, Zero>(rows[0], c, bytes, table, *three.vectors[0], scales[0], zeros[0], three.sums[0],
                                 ahead[0]);
      continue;
    }
    const int count = groups - 4 * c < 4 ? int(groups - 4 * c) : 4;
    for (int i = 0; i < Tiles; ++i) {
      if (tile.transposed)
        for (int g = 0; g < count; ++g) unpack_lines(tiles[i], 4 * c + g, table, w[i] + g * 8);
      else if (kLanes == kRows)
        unpack_rows(rows[i], c * 64, bytes - c * 64, table, w[i], ahead[i]);
      else
        unpack_quads(rows[i], c * 64, bytes - c * 64, table, w[i], ahead[i]);
    }
    if (kLanes == kRows) {
      if (two.count) multiply_batch<2, Tiles, Zero>(w[0], two, c, count, scales[0], zeros[0]);
      if (three.count) multiply_batch<3, Tiles, Zero>(w[0], three, c, count, scales[0], zeros[0]);
    } else {
      if (two.count) multiply_few<2, Zero>(w[0], two, c, scales[0], zeros[0]);
      if (three.count) multiply_few<3, Zero>(w[0], three, c, scales[0], zeros[0]);
    }
  }
  special[0] = first.special();
  if (Tiles == 2) special[1] = second.special();
}

// ((sum 0 + sum 1) + (sum 2 + sum 3)) + bias.
template <Lanes kLanes>
inline void join(const float* sums, const float* bias, float* out) {
  for (int q = 0; q < 4; ++q) {
    const float* part = sums + (kLanes == kRows ? q * 4 : q * 16);
    constexpr int kStep = kLanes == kRows ? 16 : 4;
    const __m128 low = _mm_add_ps(_mm_load_ps(part), _mm_load_ps(part + kStep));
    const __m128 high = _mm_add_ps(_mm_load_ps(part + 2 * kStep), _mm_load_ps(part + 3 * kStep));
    _mm_storeu_ps(out + 4 * q, _mm_add_ps(_mm_add_ps(low, high), _mm_load_ps(bias + 4 * q)));
  }
}

constexpr int kFew = 3;  // measured: up to here kRowGroups is as fast or faster

void tile_rows(const Tile* tiles, int num_tiles, const Vector* const* vectors, int count, const TileScratch& scratch,
               float (*const* out)[16]) {
  Batch two, three;
  for (int t = 0; t < count; ++t) {
    if (vectors[t]->num_digits == 0) continue;
    Batch& batch = vectors[t]->num_digits == 2 ? two : three;
    batch.vectors[batch.count] = vectors[t], batch.sums[batch.count++] = scratch.sums + t * 64;
  }
  const int with_digits = two.count + three.count;
  const bool zero = tiles[0].zero != nullptr, few = with_digits <= kFew && !tiles[0].transposed;
  const bool pair = num_tiles == 2 && !few && !tiles[0].transposed && tiles[0].rows == tiles[1].rows;
  for (int i = 0; i < num_tiles; i += pair ? 2 : 1) {
    uint32_t special[2] = {};
    const int at_once = pair ? 2 : 1;
    if (with_digits) {
      for (int p = 0; p < at_once; ++p)
        std::memset(scratch.sums + p * kTileTokens * 64, 0, size_t(count) * 64 * sizeof(float));
      const auto loop = pair               ? (zero ? tile_loop<kRows, 0, 2, true> : tile_loop<kRows, 0, 2, false>)
                        : !few             ? (zero ? tile_loop<kRows, 0, 1, true> : tile_loop<kRows, 0, 1, false>)
                        : with_digits == 1 ? (zero ? tile_loop<kRowGroups, 1, 1, true> : tile_loop<kRowGroups, 1, 1, false>)
                                           : (zero ? tile_loop<kRowGroups, 0, 1, true> : tile_loop<kRowGroups, 0, 1, false>);
      // One tile after the other: the second follows the first, and the next call's first follows the last.
      loop(tiles + i, two, three, scratch, i + 1 < num_tiles ? tiles + i + 1 : tiles[0].next, special);
    }
    for (int p = 0; p < at_once; ++p) {
      alignas(64) float bias[16] = {};
      for (int r = 0; r < tiles[i + p].rows; ++r) bias[r] = bias_of(tiles[i + p], r);
      const float* sums = scratch.sums + p * kTileTokens * 64;
      for (int t = 0; t < count && with_digits; ++t)
        few ? join<kRowGroups>(sums + t * 64, bias, out[i + p][t]) : join<kRows>(sums + t * 64, bias, out[i + p][t]);
      exact_tile(tiles[i + p], vectors, count, special[p], scratch, out[i + p]);
    }
  }
}

constexpr Isa kIsa = {"avx512", prepare, tile_rows, activate_rows, nullptr};

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
