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

constexpr int MMA_TILES = NT / 2;  // of 8 rows of an expert
static_assert(NT % 2 == 0, "rows of an expert come in eights");
constexpr u32 TWO_100 = 0x71807180u, TWO_96 = 0x6F806F80u;  // twice in bf16
constexpr float TWO_33 = 8589934592.0f;

__device__ __forceinline__ void store_shared_16(u32 address, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Activations of a column block in shared memory: for each step of 32 columns and 8 rows of the expert 512 bytes, in which
// each lane finds its words of both products, side by side; after all steps the sums, fp32 [step][row]. Row r is the
// product's column 2 (r % 4) + r / 4 % 2 of tile r / 8: a lane ends up with rows q and q + 4, as `finish_unit` expects.
__device__ __forceinline__ u32 column_of(int row) { return row % 4 * 2 + row / 4 % 2; }

template <class P>
__device__ __forceinline__ void bring_rows(const Decode& p, const Routes& routes, int block, u32 thread, u32 to) {
  constexpr int WORKERS = CONSUMERS * 32, EIGHTS = P::GROUPS * 4, HELD = 8;
  constexpr int STEPS = (EIGHTS + WORKERS - 1) / WORKERS;  // of a row
  const int first = routes.first[block], items = routes.count[block] * STEPS;
  const u32 sums = to + P::BATCHES * P::BATCH * (512 * MMA_TILES);
  for (int base = 0; base < items; base += HELD) {
    uint4 held[HELD];
    const auto eight_of = [&](int i) { return (base + i) % STEPS * WORKERS + static_cast<int>(thread); };
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      held[i] = make_uint4(0, 0, 0, 0);
      if (base + i >= items || eight_of(i) >= EIGHTS) continue;
      const u8* row = activations<P>(p, routes.at(first + (base + i) / STEPS));
      held[i] = load_eight(row + eight_of(i) * 16, MXK_X_ALIGNED || !(P::PAIRS || PROJECT));
    }
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      if (base + i >= items) break;  // for all threads alike
      const uint4& v = held[i];
      const int row = (base + i) / STEPS, eight = eight_of(i);
      const u32 at = eight / 4 * MMA_TILES + row / 8, column = column_of(row);
      const auto low = [](u32 pair) { return __uint_as_float(pair << 16); };
      const auto high = [](u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); };
      float sum = ((low(v.x) + high(v.x)) + (low(v.y) + high(v.y))) + ((low(v.z) + high(v.z)) + (low(v.w) + high(v.w)));
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (eight >= EIGHTS) continue;
      // Columns j and j + 4 meet in a word, as nibbles j and j + 4 of the weights do.
      store_shared_16(to + at * 512 + column * 64 + eight % 4 * 16,
                      make_uint4(multiply_bf16x2(__byte_perm(v.x, v.z, 0x5410), TWO_100),
                                 multiply_bf16x2(__byte_perm(v.x, v.z, 0x7632), TWO_96),
                                 multiply_bf16x2(__byte_perm(v.y, v.w, 0x5410), TWO_100),
                                 multiply_bf16x2(__byte_perm(v.y, v.w, 0x7632), TWO_96)));
      if (eight % 4 == 0)
        store_shared_4(sums + (at * 8 + column) * 4, __float_as_uint(sum * (MXK_ZEROS ? -1.0f : -8.0f) / TWO_33));
    }
  }
  // Columns past the end must be finite: the weights there are whatever the slot holds.
  constexpr u32 END = P::GROUPS * MMA_TILES;
  for (u32 at = END * 512 + thread * 4; at < P::BATCHES * P::BATCH * (512 * MMA_TILES); at += WORKERS * 4) store_shared_4(to + at, 0);
  for (u32 at = END * 32 + thread * 4; at < P::BATCHES * P::BATCH * (32 * MMA_TILES); at += WORKERS * 4) store_shared_4(sums + at, 0);
}

// A word's nibbles 0 and 4, 1 and 5, 2 and 6, 3 and 7 as bf16 pairs: columns of A and rows of B are permuted alike.
__device__ __forceinline__ void unpack_codes(u32 word, u32 (&pairs)[4]) {
  constexpr u32 LOW = 0x000F000Fu, HIGH = 0x00F000F0u, SIGNS = MXK_FORMAT == 2 ? 0x00880088u : 0;
  const u32 upper = word >> 8;
  pairs[0] = (word & LOW) ^ (SIGNS & LOW), pairs[1] = (word & HIGH) ^ (SIGNS & HIGH);
  pairs[2] = (upper & LOW) ^ (SIGNS & LOW), pairs[3] = (upper & HIGH) ^ (SIGNS & HIGH);
}

// The scales of BATCH steps from `step` on, in fp32, of a row whose scales are at `row`.
template <class P>
__device__ __forceinline__ void load_scales(u32 row, int step, float (&scales)[P::BATCH]) {
  if constexpr (P::PADDED && P::BATCH == 4 && GROUP_LOG == 5 && MXK_SCALES == BF16) {
    const uint2 pairs = load_shared_8(row + step * 2);
    scales[0] = __uint_as_float(pairs.x << 16), scales[1] = __uint_as_float(pairs.x & 0xFFFF0000u);
    scales[2] = __uint_as_float(pairs.y << 16), scales[3] = __uint_as_float(pairs.y & 0xFFFF0000u);
  } else {
#pragma unroll
    for (int i = 0; i < P::BATCH; ++i) {
      const int group = GROUP_LOG == 31 ? 0 : (step + i) >> (GROUP_LOG - 5);
      if constexpr (SCALE_BYTES == 4) {
        scales[i] = __uint_as_float(load_shared_4(row + group * 4));
      } else {
        const u32 bits = load_shared_2(row + group * 2);
        scales[i] = __uint_as_float(bits << 16);
        if constexpr (MXK_SCALES == FP16) asm("cvt.f32.f16 %0, %1;" : "=f"(scales[i]) : "h"(static_cast<u16>(bits)));
      }
    }
  }
}
__device__ __forceinline__ float load_zero(u32 row, int step) {
  return static_cast<float>(load_shared_byte(row + (GROUP_LOG == 31 ? 0 : step >> (GROUP_LOG - 5))));
}

// Where a lane reads of a tile: of its fragment row g in the first unit, and from there to row g + 8.
struct LaneRows {
  u32 weights, half_weights, scales, half_scales, zeros, half_zeros;
};

// BATCH steps of all units. `step`: the first, of those in the row; weights and activations start there.
template <class P>
__device__ __forceinline__ void multiply_batch(const LaneRows& at, u32 weights, u32 rows, u32 sums, int step,
                                               float (&total)[TILE_UNITS][MMA_TILES][4]) {
  constexpr int LEFT = P::GROUPS - (P::BATCHES - 1) * P::BATCH;  // of the last batch of a row
  const bool last = LEFT != P::BATCH && step == (P::BATCHES - 1) * P::BATCH;
  const int lane = threadIdx.x & 31, q = lane & 3;
  float scales[TILE_UNITS][2][P::BATCH];
#pragma unroll
  for (int u = 0; u < TILE_UNITS; ++u) {
    const u32 row = at.scales + u * (P::scale_at(1, 0, 0) - P::scale_at(0, 0, 0));
    load_scales<P>(row, step, scales[u][0]), load_scales<P>(row + at.half_scales, step, scales[u][1]);
  }
#pragma unroll
  for (int i = 0; i < P::BATCH; ++i) {
    uint4 b[MMA_TILES];
    float start[MMA_TILES][2];
#pragma unroll
    for (int t = 0; t < MMA_TILES; ++t) {
      b[t] = load_shared_16(rows + (i * MMA_TILES + t) * 512 + lane * 16);
      const uint2 pair = load_shared_8(sums + (i * MMA_TILES + t) * 32 + q * 8);
      start[t][0] = __uint_as_float(pair.x), start[t][1] = __uint_as_float(pair.y);
    }
#pragma unroll
    for (int u = 0; u < TILE_UNITS; ++u) {
      u32 low[4], high[4];
      const u32 word = weights + u * (UNIT * P::STRIDE) + i * 16;
      unpack_codes(load_shared_4(word), low);
      unpack_codes(load_shared_4(word + at.half_weights), high);
      float zero[2] = {1.0f, 1.0f};
      // Products of steps that are not there are 0, whatever the slot holds; their scales may be NaN, which would cost the
      // product in plain fp32.
      const bool there = i < LEFT || !last;
      const float scale[2] = {there ? scales[u][0][i] : 0.0f, there ? scales[u][1][i] : 0.0f};
      if constexpr (MXK_ZEROS) {
        const u32 of = at.zeros + u * (P::zero_at(1, 0, 0) - P::zero_at(0, 0, 0));
        zero[0] = load_zero(of, step + i), zero[1] = load_zero(of + at.half_zeros, step + i);
      }
#pragma unroll
      for (int t = 0; t < MMA_TILES; ++t) {
        float d[4] = {start[t][0], start[t][1], start[t][0], start[t][1]};
        if constexpr (MXK_ZEROS) d[0] *= zero[0], d[1] *= zero[0], d[2] *= zero[1], d[3] *= zero[1];
        add_product_bf16(d, {low[0], high[0], low[1], high[1]}, b[t].x, b[t].y);
        add_product_bf16(d, {low[2], high[2], low[3], high[3]}, b[t].z, b[t].w);
#pragma unroll
        for (int j = 0; j < 4; ++j) total[u][t][j] += d[j] * scale[j / 2];
      }
    }
  }
}

struct ConsumerTurns {
  Turn slot, scales, sums;
};

// All units of every tile: the batches of columns whose number modulo SHARES is this warp's.
template <class P>
__device__ __forceinline__ void multiply_rows(const Decode& p, const Routes& routes, const RowsReady& ready, int share, u32 shared,
                                              ConsumerTurns& turn) {
  const int lane = threadIdx.x & 31, q = lane & 3, g = lane >> 2;
  const u32 barriers = shared + AT_BARRIERS, thread = threadIdx.x - HELPERS * 32;
  const u32 rows = shared + AT_DIGITS, sums = rows + P::BATCHES * P::BATCH * (512 * MMA_TILES);
  LaneRows at;
  at.half_weights = (P::slot_row(g, 1) - P::slot_row(g, 0)) * P::STRIDE;
  at.half_scales = P::scale_at(0, g, 1) - P::scale_at(0, g, 0), at.half_zeros = P::zero_at(0, g, 1) - P::zero_at(0, g, 0);
  int block = -1, part = -1;
  for (Walk<P> walk(routes.blocks); walk.next(); turn.scales.advance(SCALE_STAGES), turn.sums.advance(SUM_STAGES)) {
    if (walk.block != block) {
      block = walk.block;
      if (!P::PAIRS && !PROJECT && walk.part() != part) ready.wait<2, CONSUMERS * 32>(part = walk.part(), thread);
      team_sync<2, CONSUMERS * 32>();  // nobody reads the rows of before
      bring_rows<P>(p, routes, block, thread, rows);
      team_sync<2, CONSUMERS * 32>();
    }
    const u32 scales = shared + AT_SCALES + turn.scales.slot * SCALES;
    at.scales = scales + P::skew(walk.first) + P::scale_at(0, g, 0);
    at.zeros = scales + P::ZEROS + P::zero_skew(walk.first) + P::zero_at(0, g, 0);
    float total[TILE_UNITS][MMA_TILES][4] = {};
    int batch = share;
#pragma unroll 1
    for (int chunk = 0; chunk < P::CHUNKS; ++chunk, turn.slot.advance(STAGES)) {
      at.weights = shared + turn.slot.slot * SLOT + P::slot_row(g, 0) * P::STRIDE + q * 4;
      const int first = chunk * P::CHUNK_BATCHES, end = min(first + P::CHUNK_BATCHES, P::BATCHES);
      barrier_wait(barriers + AT_SLOT_FULL + 8 * turn.slot.slot, turn.slot.parity);
#pragma unroll 1
      for (; batch < end; batch += SHARES)
        multiply_batch<P>(at, at.weights + (batch - first) * (P::BATCH * 16), rows + batch * (P::BATCH * 512 * MMA_TILES),
                          sums + batch * (P::BATCH * 32 * MMA_TILES), batch * P::BATCH, total);
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
