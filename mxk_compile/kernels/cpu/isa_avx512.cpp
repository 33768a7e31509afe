// AVX-512 with VBMI and VNNI (Ice Lake and later, Zen 4 and later).
//
// A tile is 16 output rows, one per int32 lane. 64 packed bytes of each row are transposed as 16 x 16 dwords, so that
// one register holds 8 codes of every row; vpermb turns its low and high nibbles into unsigned bytes, and vpdpbusd
// multiplies them with a vector's digits, broadcast from memory. After 8 of these = 32 columns the int32 sums of the
// digits are joined, made fp32 and scaled. Per 256 packed bytes, unpacking takes 28 instructions of the two 512-bit
// ports whatever the number of vectors; a vector adds 21 (2 digits) or 31 (3).
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

// Groups multiplied side by side: enough sums in flight to cover the 5 cycles that a dot product takes.
constexpr int groups_at_once(int digits, int count) {
  return count == 1 ? 4 : count <= 3 || (count == 4 && digits == 2) ? 2 : 1;
}

// `Groups` groups from unpacked weights w[group][8] for Count vectors: sums[t] += integer sums * unit * scales.
template <int Digits, int Count, int Groups, bool Zero>
inline __attribute__((always_inline)) void multiply(const __m512i* w, const uint8_t* const* records, const float* scales,
                                                    const float* zeros, __m512 (&out)[Count]) {
  __m512i sums[Groups][Count][Digits];
  for (int g = 0; g < Groups; ++g)
    for (int t = 0; t < Count; ++t)
      for (int d = 0; d < Digits; ++d)
        sums[g][t][d] = d == Digits - 1 && !Zero
                            ? _mm512_castps_si512(broadcast(records[t] + g * record_bytes(Digits) + Digits * kGroup + 4))
                            : _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    for (int g = 0; g < Groups; ++g) {
      const __m512i weights = w[g * 8 + i];
      for (int t = 0; t < Count; ++t)
        for (int d = 0; d < Digits; ++d)
          dot_add(sums[g][t][d], weights, records[t] + g * record_bytes(Digits) + d * kGroup + i * 4);
    }
  for (int g = 0; g < Groups; ++g)
    for (int t = 0; t < Count; ++t) {
      const uint8_t* meta = records[t] + g * record_bytes(Digits) + Digits * kGroup;
      __m512i sum = sums[g][t][0];
      for (int d = 1; d < Digits; ++d) sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 8), sums[g][t][d]);
      __m512 value = _mm512_cvtepi32_ps(sum);
      if (Zero) value = _mm512_fmadd_ps(_mm512_load_ps(zeros + g * 16), broadcast(meta + 4), value);
      out[t] = _mm512_fmadd_ps(_mm512_mul_ps(value, broadcast(meta)), _mm512_load_ps(scales + g * 16), out[t]);
    }
}

// `groups` <= 4 groups from group `first` on for Count vectors.
template <int Digits, int Count, bool Zero>
void multiply_chunk(const __m512i* w, const Vector* const* vectors, float* const* out, int64_t first, int groups,
                    const float* scales, const float* zeros) {
  constexpr int kAtOnce = groups_at_once(Digits, Count);
  const uint8_t* records[Count];
  __m512 sums[Count];
  for (int t = 0; t < Count; ++t) {
    records[t] = vectors[t]->records + first * record_bytes(Digits);
    sums[t] = _mm512_load_ps(out[t]);
  }
  int g = 0;
  const auto step = [&](int by) {
    g += by;
    for (int t = 0; t < Count; ++t) records[t] += by * record_bytes(Digits);
  };
  for (; g + kAtOnce <= groups; step(kAtOnce))
    multiply<Digits, Count, kAtOnce, Zero>(w + g * 8, records, scales + g * 16, zeros + g * 16, sums);
  if (kAtOnce > 1)
    for (; g < groups; step(1)) multiply<Digits, Count, 1, Zero>(w + g * 8, records, scales + g * 16, zeros + g * 16, sums);
  for (int t = 0; t < Count; ++t) _mm512_store_ps(out[t], sums[t]);
}

struct Batch {  // the vectors of one tile call that have the same number of digits
  const Vector* vectors[kTileTokens];
  float* out[kTileTokens];
  int count = 0;
};

// In blocks of up to 6 vectors, equal ones: 7 are 4 + 3.
template <int Digits, bool Zero>
void multiply_batch(const __m512i* w, const Batch& batch, int64_t first, int groups, const float* scales, const float* zeros) {
  constexpr decltype(&multiply_chunk<Digits, 1, Zero>) kBlocks[] = {
      multiply_chunk<Digits, 1, Zero>, multiply_chunk<Digits, 2, Zero>, multiply_chunk<Digits, 3, Zero>,
      multiply_chunk<Digits, 4, Zero>, multiply_chunk<Digits, 5, Zero>, multiply_chunk<Digits, 6, Zero>};
  for (int t = 0, blocks = (batch.count + 5) / 6; blocks > 0; --blocks) {
    const int size = (batch.count - t + blocks - 1) / blocks;
    kBlocks[size - 1](w, batch.vectors + t, batch.out + t, first, groups, scales, zeros);
    t += size;
  }
}

inline void fetch(const char*& at, const char* end, int lines) {
  for (int i = 0; i < lines && at < end; ++i, at += 64) _mm_prefetch(at, _MM_HINT_T0);
}

template <bool Zero>
uint32_t tile_loop(const Tile& tile, const Batch& two, const Batch& three, const TileScratch& scratch) {
  const int64_t groups = groups_of(tile.columns), bytes = (tile.columns + 1) / 2;
  const __m512i table = code_table(tile.format);
  const uint8_t* rows[16];
  for (int r = 0; r < 16; ++r) rows[r] = tile.weight + (r < tile.rows ? r : 0) * tile.weight_step;
  const char *ahead = reinterpret_cast<const char*>(tile.ahead[0]), *ahead_end = ahead + tile.ahead_bytes[0];
  const char *scale_ahead = reinterpret_cast<const char*>(tile.ahead[1]), *scale_end = scale_ahead + tile.ahead_bytes[1];
  const Scales all(tile, scratch);
  alignas(64) __m512i w[32];
  alignas(64) float scales[4 * 16], zeros[4 * 16];
  for (int64_t first = 0; first < groups; first += 4) {
    const int count = groups - first < 4 ? int(groups - first) : 4;
    fetch(ahead, ahead_end, 16);
    fetch(scale_ahead, scale_end, 4);
    for (int g = 0; g < count; ++g) all.get(first + g, scales + g * 16, zeros + g * 16);
    if (tile.transposed)
      for (int g = 0; g < count; ++g) unpack_lines(tile, first + g, table, w + g * 8);
    else
      unpack_rows(rows, first * 16, bytes - first * 16, table, w);
    if (two.count) multiply_batch<2, Zero>(w, two, first, count, scales, zeros);
    if (three.count) multiply_batch<3, Zero>(w, three, first, count, scales, zeros);
  }
  return all.special();
}

void tile_rows(const Tile& tile, const Vector* const* vectors, int count, const TileScratch& scratch, float (*out)[16]) {
  alignas(64) float bias[16] = {};
  for (int r = 0; r < tile.rows; ++r) bias[r] = bias_of(tile, r);
  Batch two, three;
  for (int t = 0; t < count; ++t) {
    std::memcpy(out[t], bias, sizeof bias);
    if (vectors[t]->num_digits == 0) continue;
    Batch& batch = vectors[t]->num_digits == 2 ? two : three;
    batch.vectors[batch.count] = vectors[t], batch.out[batch.count++] = out[t];
  }
  uint32_t special = 0;
  if (two.count + three.count)
    special = tile.zero ? tile_loop<true>(tile, two, three, scratch) : tile_loop<false>(tile, two, three, scratch);
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
