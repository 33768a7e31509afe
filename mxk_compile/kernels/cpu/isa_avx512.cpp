// AVX-512 with VBMI and VNNI (Ice Lake and later, Zen 4 and later).
//
// A tile is 16 output rows; a step takes 64 packed bytes of each, 4 groups of 32 columns. Rows are transposed by dwords
// so that a register holds 8 codes of one group for each lane, vpermb turns low and high nibbles into unsigned bytes,
// and vpdpbusd multiplies them with a vector's digits. After 8 of these the int32 sums of the digits are joined, made
// fp32 and scaled. Two ways to share the lanes (Lanes):
//   kRowGroups  a quad of rows in the step's 4 groups. Half the shuffles, which all need one port; the digits take a
//               shuffle per 4 dot products. For few vectors, which wait for memory or for that port.
//   kRows       one group of 16 rows. Digits are broadcast from memory by the dot product itself. For many vectors.
// Both add up a row's groups g, g + 4, g + 8, ... in four fp32 sums and join them in one order: results are the same.
// vdpbf16ps, the obvious choice, has an eighth of the rate of vpdpbusd here (docs/performance/cpu.md).
#include "tile.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
#include "avx512_prepare.h"
#include "avx512_unpack.h"

namespace {

// acc + w (unsigned bytes) . the 4 digits at `four`, in every lane. Written out because GCC 12 does not fold the
// broadcast into the instruction, which costs a quarter of the rate.
inline void dot_add(__m512i& acc, const __m512i& w, const uint8_t* four) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*reinterpret_cast<const int32_t(*)[1]>(four)));
}

inline __m512 broadcast(const uint8_t* at) {
  float value;
  std::memcpy(&value, at, 4);
  return _mm512_set1_ps(value);
}

template <int N>
struct Constant {
  static constexpr int value = N;
};

constexpr int kMeta = 16;  // bytes from the units to the corrections of a chunk

// ---- many vectors --------------------------------------------------------------------------------------------------

// Groups multiplied side by side: enough sums in flight to cover the 5 cycles that a dot product takes.
constexpr int groups_at_once(int digits, int count) {
  return count == 1 ? 4 : count <= 3 || (count == 4 && digits == 2) ? 2 : 1;
}

// `Groups` groups, from weights w[group][8], of Count vectors: sums[t][group] += integer sums * unit * scales.
template <int Digits, int Count, int Groups, bool Zero>
inline __attribute__((always_inline)) void multiply(const __m512i* w, const uint8_t* const* chunks, int first,
                                                    const float* scales, const float* zeros, float* const* sums) {
  __m512i products[Groups][Count][Digits];
  for (int g = 0; g < Groups; ++g)
    for (int t = 0; t < Count; ++t)
      for (int d = 0; d < Digits; ++d)
        products[g][t][d] = d == Digits - 1 && !Zero
                                ? _mm512_castps_si512(broadcast(chunks[t] + Digits * kDigit + kMeta + (first + g) * 4))
                                : _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    for (int g = 0; g < Groups; ++g) {
      const __m512i weights = w[(first + g) * 8 + i];
      for (int t = 0; t < Count; ++t)
        for (int d = 0; d < Digits; ++d)
          dot_add(products[g][t][d], weights, chunks[t] + d * kDigit + (i & 1) * kPlane + (first + g) * 16 + i / 2 * 4);
    }
  for (int g = 0; g < Groups; ++g)
    for (int t = 0; t < Count; ++t) {
      const uint8_t* meta = chunks[t] + Digits * kDigit + (first + g) * 4;
      float* sum = sums[t] + (first + g) * 16;
      __m512i product = products[g][t][0];
      for (int d = 1; d < Digits; ++d) product = _mm512_add_epi32(_mm512_slli_epi32(product, 8), products[g][t][d]);
      __m512 value = _mm512_cvtepi32_ps(product);
      if (Zero) value = _mm512_fmadd_ps(_mm512_load_ps(zeros + (first + g) * 16), broadcast(meta + kMeta), value);
      value = _mm512_mul_ps(value, broadcast(meta));
      _mm512_store_ps(sum, _mm512_fmadd_ps(value, _mm512_load_ps(scales + (first + g) * 16), _mm512_load_ps(sum)));
    }
}

// The same of one group in two tiles, w, scales and zeros of the second following those of a chunk of the first, its sums
// kTileTokens vectors on: digits are loaded once for both.
template <int Digits, int Count, bool Zero>
inline __attribute__((always_inline)) void multiply_pair(const __m512i* w, const uint8_t* const* chunks, int g,
                                                         const float* scales, const float* zeros, float* const* sums) {
  __m512i products[2][Count][Digits];
  for (int t = 0; t < Count; ++t)
    for (int d = 0; d < Digits; ++d)
      products[0][t][d] = products[1][t][d] =
          d == Digits - 1 && !Zero ? _mm512_castps_si512(broadcast(chunks[t] + Digits * kDigit + kMeta + g * 4))
                                   : _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m512i a = w[g * 8 + i], b = w[32 + g * 8 + i];
    for (int t = 0; t < Count; ++t)
      for (int d = 0; d < Digits; ++d) {
        const __m512i four =
            _mm512_castps_si512(broadcast(chunks[t] + d * kDigit + (i & 1) * kPlane + g * 16 + i / 2 * 4));
        products[0][t][d] = _mm512_dpbusd_epi32(products[0][t][d], a, four);
        products[1][t][d] = _mm512_dpbusd_epi32(products[1][t][d], b, four);
      }
  }
  for (int t = 0; t < Count; ++t) {
    const uint8_t* meta = chunks[t] + Digits * kDigit + g * 4;
    const __m512 unit = broadcast(meta);
    for (int i = 0; i < 2; ++i) {
      float* sum = sums[t] + i * kTileTokens * 64 + g * 16;
      __m512i product = products[i][t][0];
      for (int d = 1; d < Digits; ++d) product = _mm512_add_epi32(_mm512_slli_epi32(product, 8), products[i][t][d]);
      __m512 value = _mm512_cvtepi32_ps(product);
      if (Zero) value = _mm512_fmadd_ps(_mm512_load_ps(zeros + i * 64 + g * 16), broadcast(meta + kMeta), value);
      value = _mm512_mul_ps(value, unit);
      _mm512_store_ps(sum, _mm512_fmadd_ps(value, _mm512_load_ps(scales + i * 64 + g * 16), _mm512_load_ps(sum)));
    }
  }
}

// The first `groups` groups of chunk c for Count vectors.
template <int Digits, int Count, int Tiles, bool Zero>
void multiply_chunk(const __m512i* w, const Vector* const* vectors, float* const* sums, int64_t c, int groups,
                    const float* scales, const float* zeros) {
  const uint8_t* chunks[Count];
  for (int t = 0; t < Count; ++t) chunks[t] = vectors[t]->chunks + c * chunk_bytes(Digits);
  if (Tiles == 2) {
    for (int g = 0; g < groups; ++g) multiply_pair<Digits, Count, Zero>(w, chunks, g, scales, zeros, sums);
    return;
  }
  constexpr int kAtOnce = groups_at_once(Digits, Count);
  int g = 0;
  for (; g + kAtOnce <= groups; g += kAtOnce) multiply<Digits, Count, kAtOnce, Zero>(w, chunks, g, scales, zeros, sums);
  if (kAtOnce > 1)
    for (; g < groups; ++g) multiply<Digits, Count, 1, Zero>(w, chunks, g, scales, zeros, sums);
}

struct Batch {  // the vectors of one tile call that have the same number of digits
  const Vector* vectors[kTileTokens];
  float* sums[kTileTokens];
  int count = 0;
};

// In equal blocks of as many vectors as their sums leave registers for.
template <int Digits, int Tiles, bool Zero>
void multiply_batch(const __m512i* w, const Batch& batch, int64_t c, int groups, const float* scales, const float* zeros) {
  constexpr int kMost = Tiles == 1 ? 6 : Digits == 2 ? 4 : 3;
  static constexpr decltype(&multiply_chunk<Digits, 1, Tiles, Zero>) kBlocks[] = {
      multiply_chunk<Digits, 1, Tiles, Zero>,
      multiply_chunk<Digits, 2, Tiles, Zero>,
      multiply_chunk<Digits, 3, Tiles, Zero>,
      multiply_chunk<Digits, kMost < 4 ? 1 : 4, Tiles, Zero>,
      multiply_chunk<Digits, kMost < 5 ? 1 : 5, Tiles, Zero>,
      multiply_chunk<Digits, kMost < 6 ? 1 : 6, Tiles, Zero>};
  for (int t = 0, blocks = (batch.count + kMost - 1) / kMost; blocks > 0; --blocks) {
    const int size = (batch.count - t + blocks - 1) / blocks;
    kBlocks[size - 1](w, batch.vectors + t, batch.sums + t, c, groups, scales, zeros);
    t += size;
  }
}

// ---- one vector ---------------------------------------------------------------------------------------------------

// A vector's chunk as the lanes of a quad want it.
template <int Digits>
struct Spread {
  __m512i digits[Digits][4][2];  // [dword][plane]: dword d of each group in all its lanes
  __m512 units, corrections;
};

template <int Digits>
inline __attribute__((always_inline)) void spread(const uint8_t* chunk, Spread<Digits>& to) {
  const __m512i lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  const auto meta = [&](int at) {
    const __m128 four = _mm_loadu_ps(reinterpret_cast<const float*>(chunk + Digits * kDigit + at));
    return _mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(four));
  };
  for (int d = 0; d < Digits; ++d)
    for (int plane = 0; plane < 2; ++plane) {
      const __m512i v = _mm512_loadu_si512(chunk + d * kDigit + plane * kPlane);
      to.digits[d][0][plane] = _mm512_shuffle_epi32(v, _MM_PERM_AAAA);
      to.digits[d][1][plane] = _mm512_shuffle_epi32(v, _MM_PERM_BBBB);
      to.digits[d][2][plane] = _mm512_shuffle_epi32(v, _MM_PERM_CCCC);
      to.digits[d][3][plane] = _mm512_shuffle_epi32(v, _MM_PERM_DDDD);
    }
  to.units = meta(0), to.corrections = meta(kMeta);
}

// sum[16] += (weights of a quad in a chunk) x (one vector) * units * scales.
template <int Digits, bool Zero>
inline __attribute__((always_inline)) void multiply_quad(const __m512i (&w)[8], const Spread<Digits>& x, __m512 scales,
                                                         const float* zeros, float* sum) {
  __m512i products[Digits];
  for (int d = 0; d < Digits; ++d) {
    products[d] = d == Digits - 1 && !Zero ? _mm512_castps_si512(x.corrections) : _mm512_setzero_si512();
    for (int i = 0; i < 8; ++i) products[d] = _mm512_dpbusd_epi32(products[d], w[i], x.digits[d][i / 2][i & 1]);
  }
  for (int d = 1; d < Digits; ++d) products[d] = _mm512_add_epi32(_mm512_slli_epi32(products[d - 1], 8), products[d]);
  __m512 value = _mm512_cvtepi32_ps(products[Digits - 1]);
  if (Zero) value = _mm512_fmadd_ps(_mm512_load_ps(zeros), x.corrections, value);
  _mm512_store_ps(sum, _mm512_fmadd_ps(_mm512_mul_ps(value, x.units), scales, _mm512_load_ps(sum)));
}

// Chunk c of 16 rows for one vector, sums[quad][16]. Weights and digits pass through registers only: stores of weights
// hold up the loads of rows that lie a multiple of 4 KiB from them.
template <int Digits, bool Zero>
inline __attribute__((always_inline)) void multiply_single(const uint8_t* const* rows, int64_t c, int64_t bytes,
                                                           __m512i table, const Vector& vector, const float* scales,
                                                           const float* zeros, float* sums) {
  Spread<Digits> x;
  spread(vector.chunks + c * chunk_bytes(Digits), x);
  for (int q = 0; q < 4; ++q) {
    __m512i w[8];
    unpack_quad(rows + 4 * q, c * 64, bytes - c * 64, table, w);
    multiply_quad<Digits, Zero>(w, x, _mm512_load_ps(scales + q * 16), zeros + q * 16, sums + q * 16);
  }
}

// ---- few vectors ---------------------------------------------------------------------------------------------------

// A chunk, from weights w[quad][dword][plane], of Count vectors: sums[t][quad] += integer sums * units * scales.
template <int Digits, int Count, bool Zero>
inline __attribute__((always_inline)) void multiply_quads(const __m512i* w, const uint8_t* const* chunks,
                                                          const float* scales, const float* zeros, float* const* sums) {
  const __m512i spread = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);  // a group's value to its lanes
  const auto meta = [&](int t, int at) {
    const __m128 four = _mm_loadu_ps(reinterpret_cast<const float*>(chunks[t] + Digits * kDigit + at));
    return _mm512_permutexvar_ps(spread, _mm512_castps128_ps512(four));
  };
  __m512i products[Count][Digits][4];
  for (int t = 0; t < Count; ++t) {
    const __m512i start = Zero ? _mm512_setzero_si512() : _mm512_castps_si512(meta(t, kMeta));
    for (int d = 0; d < Digits; ++d)
      for (int q = 0; q < 4; ++q) products[t][d][q] = d == Digits - 1 ? start : _mm512_setzero_si512();
  }
  const auto step = [&](auto dword) {
    constexpr int kDword = decltype(dword)::value;
    for (int plane = 0; plane < 2; ++plane) {
      __m512i weights[4];
      for (int q = 0; q < 4; ++q) weights[q] = w[q * 8 + kDword * 2 + plane];
      for (int t = 0; t < Count; ++t)
        for (int d = 0; d < Digits; ++d) {
          const __m512i digits = _mm512_shuffle_epi32(_mm512_loadu_si512(chunks[t] + d * kDigit + plane * kPlane),
                                                      _MM_PERM_ENUM(kDword * 0x55));
          for (int q = 0; q < 4; ++q) products[t][d][q] = _mm512_dpbusd_epi32(products[t][d][q], weights[q], digits);
        }
    }
  };
  step(Constant<0>()), step(Constant<1>()), step(Constant<2>()), step(Constant<3>());
  for (int t = 0; t < Count; ++t) {
    const __m512 units = meta(t, 0), corrections = Zero ? meta(t, kMeta) : _mm512_setzero_ps();
    for (int q = 0; q < 4; ++q) {
      __m512i product = products[t][0][q];
      for (int d = 1; d < Digits; ++d) product = _mm512_add_epi32(_mm512_slli_epi32(product, 8), products[t][d][q]);
      __m512 value = _mm512_cvtepi32_ps(product);
      if (Zero) value = _mm512_fmadd_ps(_mm512_load_ps(zeros + q * 16), corrections, value);
      value = _mm512_mul_ps(value, units);
      float* sum = sums[t] + q * 16;
      _mm512_store_ps(sum, _mm512_fmadd_ps(value, _mm512_load_ps(scales + q * 16), _mm512_load_ps(sum)));
    }
  }
}

template <int Digits, bool Zero>
void multiply_few(const __m512i* w, const Batch& batch, int64_t c, const float* scales, const float* zeros) {
  int t = 0;
  const auto chunk = [&](int i) { return batch.vectors[i]->chunks + c * chunk_bytes(Digits); };
  if (Digits == 2)
    for (; t + 2 <= batch.count; t += 2) {
      const uint8_t* chunks[2] = {chunk(t), chunk(t + 1)};
      multiply_quads<Digits, Digits == 2 ? 2 : 1, Zero>(w, chunks, scales, zeros, batch.sums + t);
    }
  for (; t < batch.count; ++t) {
    const uint8_t* chunks[1] = {chunk(t)};
    multiply_quads<Digits, 1, Zero>(w, chunks, scales, zeros, batch.sums + t);
  }
}

// ---- tiles ---------------------------------------------------------------------------------------------------------

// How many chunks ahead rows are fetched: measured. The lines must reach the first cache but not crowd it.
constexpr int64_t kAhead = 6, kPairAhead = 3;

// Asks for what `tile`, or `next` after it, will read some chunks after c, and for the next tile's scales.
inline void fetch(const Tile& tile, const Tile* next, int64_t c, int64_t chunks, int64_t ahead) {
  const bool beyond = c + ahead >= chunks;
  const Tile* from = beyond ? next : &tile;
  if (from == nullptr) return;
  const uint8_t* at = from->weight + (c + ahead - (beyond ? chunks : 0)) * 64;
  const int64_t step = from->weight_step, last = from->rows - 1;
  for (int r = 0; r < 16; ++r) prefetch(at + (r < last ? r : last) * step);
  if (next == nullptr || c > 15) return;
  const uint8_t* scale = next->scale + (c < next->rows ? c : 0) * next->scale_step;
  const int64_t bytes = groups_of(tile.columns) * kGroup / tile.group * dtype_bytes(tile.scale_dtype);
  for (int64_t i = 0; i < bytes; i += 64) prefetch(scale + i);
}

// Sums of the tile for all vectors; returns the rows that need exact.h.
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
  const Scales<kLanes> first(tiles[0], scratch.scales, scratch.zeros);
  const Scales<kLanes> second(tiles[Tiles - 1], scratch.scales + (Tiles - 1) * capacity, scratch.zeros + (Tiles - 1) * capacity);
  alignas(64) __m512i w[Tiles][32];
  alignas(64) float scales[Tiles][4 * 16], zeros[Tiles][4 * 16];
  for (int64_t c = 0; c < chunks; ++c) {
    for (int i = 0; i < Tiles; ++i) {
      if (!tile.transposed) fetch(tiles[i], Tiles == 2 ? tiles[i].next : next, c, chunks, Tiles == 2 ? kPairAhead : kAhead);
      (i ? second : first).get(4 * c, scales[i], zeros[i]);
    }
    if (Single) {
      if (two.count)
        multiply_single<2, Zero>(rows[0], c, bytes, table, *two.vectors[0], scales[0], zeros[0], two.sums[0]);
      else
        multiply_single<3, Zero>(rows[0], c, bytes, table, *three.vectors[0], scales[0], zeros[0], three.sums[0]);
      continue;
    }
    const int count = groups - 4 * c < 4 ? int(groups - 4 * c) : 4;
    for (int i = 0; i < Tiles; ++i) {
      if (tile.transposed)
        for (int g = 0; g < count; ++g) unpack_lines(tiles[i], 4 * c + g, table, w[i] + g * 8);
      else if (kLanes == kRows)
        unpack_rows(rows[i], c * 64, bytes - c * 64, table, w[i]);
      else
        unpack_quads(rows[i], c * 64, bytes - c * 64, table, w[i]);
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
