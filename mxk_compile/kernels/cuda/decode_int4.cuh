// The decode kernel's products with INT4 weights: codes as bf16, exactly, in the A registers of `mma.sync`, activations as
// they are in B.
//
// Masking is all the unpacking: the four bits c of a code, alone at the low end of a bf16, are the number c * 2^-133, and one
// nibble higher c * 2^-129, subnormal or not (tensor cores honour subnormals: docs/performance/h200.md). So activations
// are multiplied by 2^100, and by 2^96 where the code stands higher, and a sum by 2^33 at its end; both are exact for values
// below 2^28. A code means c - 8 or c - zero: an accumulator starts at minus that times the sum of the group's activations,
// which is made once a column block. A step of 32 columns is two products from there, whose sum is multiplied by the
// scale in fp32 and added in fp32. Where a sum is not finite, the epilogue computes it again in plain fp32.
//
// Why not wgmma on bytes or FP8, as with MXFP4 (docs/adr/0010-fp8-digits.md): activations would take two columns of the
// product each, and the sums of both be scaled; here 8 rows of an expert take what 4 take there, 12 scalings an 8 x 16 sums
// less, and nothing of the activations is rounded.
#pragma once
#include "decode_ring.cuh"
#include "mma.cuh"

constexpr int MMA_TILES = NT / 2, HELD = MMA_TILES - MXK_LAID;  // of 8 rows of an expert; those that registers hold
static_assert(HELD > 0, "the others are brought through the registers of one");
static_assert(NT % 2 == 0, "rows of an expert come in eights");
constexpr u32 TWO_100 = 0x71807180u, TWO_96 = 0x6F806F80u;  // twice in bf16
constexpr float TWO_33 = 8589934592.0f;

// Activations of a column block, in registers, those of MXK_LAID tiles in the warp's own part of shared memory: a warp has
// STEPS groups of 32 columns of every chunk of a row, the same for all weight rows. Of a step and 8 rows of the expert lane (g, q) holds B's column g, of row `row_of(g)`, and of it eight
// columns one after the other: as bf16 pairs j and j + 4, as nibbles j and j + 4 of the weights meet. A lane ends up
// with the sums of rows q and q + 4, as `finish_unit` expects.
__device__ __forceinline__ int row_of(int column) { return column / 2 + column % 2 * 4; }

template <class P>
struct Rows {
  uint4 b[P::CHUNKS][P::STEPS][HELD];
  u32 laid;  // where this lane's of the other tiles lie: [chunk][step][tile][lane]
  __device__ Rows(u32 shared, int share) : laid(shared + AT_LAID + (share * P::CHUNKS * P::STEPS * MXK_LAID * 32 + threadIdx.x % 32) * 16) {}
  __device__ static constexpr u32 place(int chunk, int step, int tile) {
    return ((chunk * P::STEPS + step) * MXK_LAID + tile - HELD) * 512;
  }

  // `sums`: where those of this warp's groups go, fp32 [chunk][step][tile][8].
  __device__ void bring(const Decode& p, const Routes& routes, int block, int share, u32 sums) {
    const int lane = threadIdx.x & 31, q = lane & 3, g = lane >> 2;
    const int first = routes.first[block], count = routes.count[block];
    __syncwarp();  // nobody reads the sums of before
    const auto load = [&](int t, int to) {
      const int row = 8 * t + row_of(g);
      const u8* from = activations<P>(p, routes.at(first + (row < count ? row : 0))) + q * 16;
#pragma unroll
      for (int c = 0; c < P::CHUNKS; ++c)
#pragma unroll
        for (int i = 0; i < P::STEPS; ++i) {
          const int group = c * P::CHUNK_GROUPS + share * P::STEPS + i;
          b[c][i][to] = make_uint4(0, 0, 0, 0);
          if (row < count && (!P::RAGGED || group < P::GROUPS))
            b[c][i][to] = load_eight(from + group * 64, MXK_X_ALIGNED || !(P::PAIRS || PROJECT));
        }
    };
    const auto scale = [&](int c, int i, int t, uint4& v) {
      const auto low = [](u32 pair) { return __uint_as_float(pair << 16); };
      const auto high = [](u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); };
      float sum = ((low(v.x) + high(v.x)) + (low(v.y) + high(v.y))) + ((low(v.z) + high(v.z)) + (low(v.w) + high(v.w)));
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (q == 0)
        store_shared_4(sums + (((c * P::STEPS + i) * MMA_TILES + t) * 8 + g) * 4,
                       __float_as_uint(sum * (MXK_ZEROS ? -1.0f : -8.0f) / TWO_33));
      v = make_uint4(multiply_bf16x2(__byte_perm(v.x, v.z, 0x5410), TWO_100),
                     multiply_bf16x2(__byte_perm(v.x, v.z, 0x7632), TWO_96),
                     multiply_bf16x2(__byte_perm(v.y, v.w, 0x5410), TWO_100),
                     multiply_bf16x2(__byte_perm(v.y, v.w, 0x7632), TWO_96));
    };
#pragma unroll
    for (int t = HELD; t < MMA_TILES; ++t) {
      load(t, 0);
#pragma unroll
      for (int c = 0; c < P::CHUNKS; ++c)
#pragma unroll
        for (int i = 0; i < P::STEPS; ++i) {
          scale(c, i, t, b[c][i][0]);
          store_shared_16(laid + place(c, i, t), b[c][i][0]);
        }
    }
#pragma unroll
    for (int t = 0; t < HELD; ++t) load(t, t);
#pragma unroll
    for (int c = 0; c < P::CHUNKS; ++c)
#pragma unroll
      for (int i = 0; i < P::STEPS; ++i)
#pragma unroll
        for (int t = 0; t < HELD; ++t) scale(c, i, t, b[c][i][t]);
    __syncwarp();
  }
};

// A word's nibbles 0 and 4, 1 and 5, 2 and 6, 3 and 7 as bf16 pairs: columns of A and rows of B are permuted alike.
__device__ __forceinline__ void unpack_codes(u32 word, u32 (&pairs)[4]) {
  constexpr u32 LOW = 0x000F000Fu, HIGH = 0x00F000F0u, SIGNS = MXK_FORMAT == 2 ? 0x00880088u : 0;
  const u32 upper = word >> 8;
  pairs[0] = (word & LOW) ^ (SIGNS & LOW), pairs[1] = (word & HIGH) ^ (SIGNS & HIGH);
  pairs[2] = (upper & LOW) ^ (SIGNS & LOW), pairs[3] = (upper & HIGH) ^ (SIGNS & HIGH);
}

// The scales, in fp32, of groups `group` and `group + 1` of the row whose scales are at `row`. Pairs are on even places.
__device__ __forceinline__ float load_scale(u32 row, int group) {
  const int at = GROUP_LOG == 31 ? 0 : group >> (GROUP_LOG - 5);
  if constexpr (SCALE_BYTES == 4) return __uint_as_float(load_shared_4(row + at * 4));
  const u32 bits = load_shared_2(row + at * 2);
  if constexpr (MXK_SCALES == BF16) return __uint_as_float(bits << 16);
  float scale;
  asm("cvt.f32.f16 %0, %1;" : "=f"(scale) : "h"(static_cast<u16>(bits)));
  return scale;
}
template <bool PAIRS_ALIGNED>
__device__ __forceinline__ void load_scales(u32 row, int group, int next, float (&scales)[2]) {
  if constexpr (PAIRS_ALIGNED && GROUP_LOG == 5 && MXK_SCALES == BF16) {
    const u32 pair = load_shared_4(row + group * 2);
    scales[0] = __uint_as_float(pair << 16), scales[1] = __uint_as_float(pair & 0xFFFF0000u);
  } else {
    scales[0] = load_scale(row, group);
    scales[1] = GROUP_LOG > 5 && group >> (GROUP_LOG - 5) % 32 == next >> (GROUP_LOG - 5) % 32 ? scales[0] : load_scale(row, next);
  }
}
__device__ __forceinline__ float load_zero(u32 row, int step) {
  return static_cast<float>(load_shared_byte(row + (GROUP_LOG == 31 ? 0 : step >> (GROUP_LOG - 5))));
}

// Where a lane reads of a tile: of its fragment row g in the first unit, and from there to row g + 8.
struct LaneRows {
  u32 weights, half_weights, scales, half_scales, zeros, half_zeros;
};

// This warp's groups of one chunk, of all units of a tile.
template <class P>
__device__ __forceinline__ void multiply_chunk(const LaneRows& at, const Rows<P>& rows, int chunk, u32 sums, int first,
                                               float (&total)[TILE_UNITS][MMA_TILES][4]) {
  const int q = threadIdx.x & 3;
  // Groups that are not there have activations of 0: any scale of the row will do.
  const auto group_of = [&](int i) {
    return P::RAGGED ? min(first + i, P::GROUPS - 1) : first + i;
  };
  float scales[TILE_UNITS][2][2];
#pragma unroll
  for (int i = 0; i < P::STEPS; ++i) {
#pragma unroll
    for (int u = 0; u < TILE_UNITS && i % 2 == 0; ++u) {
      const u32 row = at.scales + u * (P::scale_at(1, 0, 0) - P::scale_at(0, 0, 0));
      constexpr bool ALIGNED_PAIRS = P::PADDED && P::STEPS % 2 == 0 && !P::RAGGED;
      load_scales<ALIGNED_PAIRS>(row, group_of(i), group_of(i + 1), scales[u][0]);
      load_scales<ALIGNED_PAIRS>(row + at.half_scales, group_of(i), group_of(i + 1), scales[u][1]);
    }
    uint4 b[MMA_TILES];
#pragma unroll
    for (int t = 0; t < MMA_TILES; ++t)
      if (t < HELD) b[t] = rows.b[chunk][i][t];
      else b[t] = load_shared_16(rows.laid + Rows<P>::place(chunk, i, t));
    float start[MMA_TILES][2];
#pragma unroll
    for (int t = 0; t < MMA_TILES; ++t) {
      const uint2 pair = load_shared_8(sums + (i * MMA_TILES + t) * 32 + q * 8);
      start[t][0] = __uint_as_float(pair.x), start[t][1] = __uint_as_float(pair.y);
    }
#pragma unroll
    for (int u = 0; u < TILE_UNITS; ++u) {
      u32 low[4], high[4];
      const u32 word = at.weights + u * (UNIT * P::STRIDE) + i * 16;
      unpack_codes(load_shared_4(word), low);
      unpack_codes(load_shared_4(word + at.half_weights), high);
      float zero[2] = {1.0f, 1.0f};
      if constexpr (MXK_ZEROS) {
        const u32 of = at.zeros + u * (P::zero_at(1, 0, 0) - P::zero_at(0, 0, 0));
        zero[0] = load_zero(of, group_of(i)), zero[1] = load_zero(of + at.half_zeros, group_of(i));
      }
#pragma unroll
      for (int t = 0; t < MMA_TILES; ++t) {
        float d[4] = {start[t][0], start[t][1], start[t][0], start[t][1]};
        if constexpr (MXK_ZEROS) d[0] *= zero[0], d[1] *= zero[0], d[2] *= zero[1], d[3] *= zero[1];
        add_product_bf16(d, {low[0], high[0], low[1], high[1]}, b[t].x, b[t].y);
        add_product_bf16(d, {low[2], high[2], low[3], high[3]}, b[t].z, b[t].w);
#pragma unroll
        for (int j = 0; j < 4; ++j) total[u][t][j] += d[j] * scales[u][j / 2][i % 2];
      }
    }
  }
}

struct ConsumerTurns {
  Turn slot, scales, sums;
};

// All units of every tile; warp `share` has its groups of every chunk.
template <class P>
__device__ __forceinline__ void multiply_rows(const Decode& p, const Routes& routes, const RowsReady& ready, int share, u32 shared,
                                              ConsumerTurns& turn) {
  const int lane = threadIdx.x & 31, q = lane & 3, g = lane >> 2;
  const u32 barriers = shared + AT_BARRIERS, sums = shared + AT_DIGITS + share * (P::CHUNKS * P::STEPS * (32 * MMA_TILES));
  LaneRows at;
  at.half_weights = (P::slot_row(g, 1) - P::slot_row(g, 0)) * P::STRIDE;
  at.half_scales = P::scale_at(0, g, 1) - P::scale_at(0, g, 0), at.half_zeros = P::zero_at(0, g, 1) - P::zero_at(0, g, 0);
  Rows<P> rows(shared, share);
  int block = -1, part = -1;
#pragma unroll 1
  for (Walk<P> walk(routes.blocks); walk.next(); turn.scales.advance(SCALE_STAGES), turn.sums.advance(SUM_STAGES)) {
    if (walk.block != block) {
      block = walk.block;
      if (!P::PAIRS && !PROJECT && walk.part() != part)
        ready.wait<2, CONSUMERS * 32>(part = walk.part(), threadIdx.x - HELPERS * 32);
      rows.bring(p, routes, block, share, sums);
    }
    const u32 scales = shared + AT_SCALES + turn.scales.slot * SCALES;
    at.scales = scales + P::skew(walk.first) + P::scale_at(0, g, 0);
    at.zeros = scales + P::ZEROS + P::zero_skew(walk.first) + P::zero_at(0, g, 0);
    float total[TILE_UNITS][MMA_TILES][4] = {};
#pragma unroll
    for (int chunk = 0; chunk < P::CHUNKS; ++chunk, turn.slot.advance(STAGES)) {
      at.weights = shared + turn.slot.slot * SLOT + P::slot_row(g, 0) * P::STRIDE + share * (P::STEPS * 16) + q * 4;
      barrier_wait(barriers + AT_SLOT_FULL + 8 * turn.slot.slot, turn.slot.parity);
      multiply_chunk<P>(at, rows, chunk, sums + chunk * (P::STEPS * 32 * MMA_TILES), chunk * P::CHUNK_GROUPS + share * P::STEPS, total);
      __syncwarp();
      if (lane == 0) barrier_arrive(barriers + AT_SLOT_EMPTY + 8 * turn.slot.slot);
    }
    if (lane == 0) barrier_arrive(barriers + AT_SCALES_EMPTY + 8 * turn.scales.slot);
    barrier_wait(barriers + AT_SUMS_EMPTY + 8 * turn.sums.slot, turn.sums.parity ^ 1);
    const u32 to = shared + AT_SUMS + turn.sums.slot * SUM_SET + share * (TILE_UNITS * SUM) + lane * 8;
#pragma unroll
    for (int u = 0; u < TILE_UNITS; ++u)
#pragma unroll
      for (int n = 0; n < NT; ++n)
        store_shared_8(to + u * SUM + n * 256, total[u][n / 2][n % 2] * TWO_33, total[u][n / 2][2 + n % 2] * TWO_33);
    __syncwarp();
    if (lane == 0) barrier_arrive(barriers + AT_SUMS_FULL + 8 * turn.sums.slot);
  }
}
