// AVX-512: weights times vectors, by chunks of 4 groups. Included by isa_avx512.cpp alone.
#pragma once
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

// Rows stay as they lie: a row's 64 bytes meet the digits of their 4 groups, 4 lanes a group, and the sums of the lanes are
// joined when 4 rows have theirs: 6 shuffles for 4 rows instead of 8 before the codes and 4 for the digits.

// A vector's chunk, each group in its 4 lanes.
template <int Digits>
struct Spread {
  __m512i digits[Digits][2];  // [plane]
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
    for (int plane = 0; plane < 2; ++plane) to.digits[d][plane] = _mm512_loadu_si512(chunk + d * kDigit + plane * kPlane);
  to.units = meta(0), to.corrections = meta(kMeta);
}

// Integer sums of a quad of rows: lane 4 g + i is group g of row i.
template <int Digits>
inline __attribute__((always_inline)) __m512i dot_quad(const __m512i (&v)[4], __m512i table, const Spread<Digits>& x) {
  __m512i sums[4];
  for (int r = 0; r < 4; ++r) {
    __m512i w[2];
    unpack(v[r], table, w);
    sums[r] = _mm512_setzero_si512();
    for (int d = 0; d < Digits; ++d) {
      if (d) sums[r] = _mm512_slli_epi32(sums[r], 8);
      for (int plane = 0; plane < 2; ++plane) sums[r] = _mm512_dpbusd_epi32(sums[r], w[plane], x.digits[d][plane]);
    }
  }
  const auto pairs = [](__m512i a, __m512i b) {
    return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  };
  const __m512i a = pairs(sums[0], sums[1]), b = pairs(sums[2], sums[3]);
  return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

// Chunk c of 16 rows for one vector, sums[quad][16]. Weights and digits pass through registers only: stores of weights
// hold up the loads of rows that lie a multiple of 4 KiB from them.
template <int Digits, bool Zero>
inline __attribute__((always_inline)) void multiply_single(const uint8_t* const* rows, int64_t c, int64_t bytes,
                                                           __m512i table, const Vector& vector, const float* scales,
                                                           const float* zeros, float* sums, const Ahead& ahead) {
  Spread<Digits> x;
  spread(vector.chunks + c * chunk_bytes(Digits), x);
  for (int q = 0; q < 4; ++q) {
    __m512i v[4];
    load_rows(rows + 4 * q, 4, c * 64, bytes - c * 64, v);
    ahead.ask(4 * q, 4);
    __m512i product = dot_quad(v, table, x);
    if (!Zero) product = _mm512_add_epi32(product, _mm512_castps_si512(x.corrections));
    __m512 value = _mm512_cvtepi32_ps(product);
    if (Zero) value = _mm512_fmadd_ps(_mm512_load_ps(zeros + q * 16), x.corrections, value);
    float* sum = sums + q * 16;
    _mm512_store_ps(sum, _mm512_fmadd_ps(_mm512_mul_ps(value, x.units), _mm512_load_ps(scales + q * 16), _mm512_load_ps(sum)));
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

}  // namespace
