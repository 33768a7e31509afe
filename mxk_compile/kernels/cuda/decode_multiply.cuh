// The decode kernel's products: weights as FP8, exactly, in the A registers, a group of 32 columns an instruction.
#pragma once
#if MXK_MULTIPLY
#include "decode_mma.cuh"
#else
#include "decode_wgmma.cuh"
#endif

// Eight E2M1 codes as E4M3 of code * 2^-6: exponent and upper mantissa bit keep their places beside each other, so
// subnormals and -0 are right too. `even`: nibbles 0, 2, 4, 6; the lower nibble of a byte is the earlier column.
__device__ __forceinline__ void unpack(u32 word, u32& even, u32& odd) {
  const u32 raised = word << 4;
  even = (raised & 0x80808080u) | (raised >> 2 & 0x1C1C1C1Cu);
  odd = (word & 0x80808080u) | (word >> 2 & 0x1C1C1C1Cu);
}
// An E8M0 byte: if small as 2^(byte - 63), which takes one instruction and is a normal number for byte 0. Otherwise as it is,
// but infinite from 253 on, where weights may be infinite or NaN: `finish_unit` then computes the product again.
__device__ __forceinline__ float scale_of(u32 byte) {
  if constexpr (MXK_SCALES_SMALL) return __uint_as_float((byte << 23) + (64u << 23));
  return __uint_as_float(byte == 0 ? 0x00400000u : byte >= 253 ? 0x7F800000u : byte << 23);
}
// Undoes the scale of the activations' row and the weights' 2^-6, and 2^64 where scales are small: a sum's at its end;
// otherwise each group's, whose own scale may be any.
struct Factor {
  float factor, rest;
  __device__ void load(u32 address) {
    factor = __uint_as_float(load_shared_4(address)), rest = __uint_as_float(load_shared_4(address + 4));
  }
  __device__ bool infinite() const { return factor == __uint_as_float(0x7F800000u); }
  __device__ float group(float sum) const { return MXK_SCALES_SMALL ? sum : sum * factor * rest; }
  __device__ float end(float sum) const { return infinite() ? factor : MXK_SCALES_SMALL ? sum * factor * rest : sum; }
};

// BATCH groups of 16 rows a warp. weights, scales: of this lane's fragment row g; half_weights, half_scales: from there
// to those of g + 8.
template <class P>
__device__ __forceinline__ void multiply_batch(u32 weights, u32 half_weights, u32 scales, u32 half_scales, u32 digits, bool last,
                                               const Factor (&factors)[NT], float (&sum)[NT][2]) {
  constexpr int LEFT = P::GROUPS - (P::BATCHES - 1) * P::BATCH;  // of the last batch of a row
  const u32 first = uniform_digits(digits);
  u32 a[P::BATCH][4], bytes[P::BATCH][2];
  float d[P::BATCH][NT][4];
#pragma unroll
  for (int i = 0; i < P::BATCH; ++i) {
    const u32 low = load_shared_4(weights + 16 * i), high = load_shared_4(weights + half_weights + 16 * i);
    unpack(low, a[i][0], a[i][2]);
    unpack(high, a[i][1], a[i][3]);
  }
  begin_products();
#pragma unroll
  for (int i = 0; i < P::BATCH; ++i) Product<NT>::run(d[i], a[i], first + i * DIGITS_STEP);
  end_products();
#pragma unroll
  for (int i = 0; i < P::BATCH; ++i) {
    bytes[i][0] = load_shared_byte(scales + i), bytes[i][1] = load_shared_byte(scales + half_scales + i);
    if (i >= LEFT && last) bytes[i][0] = bytes[i][1] = 0;  // those products are 0, whatever the slot holds
  }
  wait_for_products();
#pragma unroll
  for (int i = 0; i < P::BATCH; ++i)
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      asm volatile("" : "+f"(d[i][n][0]), "+f"(d[i][n][1]), "+f"(d[i][n][2]), "+f"(d[i][n][3])::"memory");
      sum[n][0] += factors[n].group(d[i][n][0] + d[i][n][1] * 0.0625f) * scale_of(bytes[i][0]);
      sum[n][1] += factors[n].group(d[i][n][2] + d[i][n][3] * 0.0625f) * scale_of(bytes[i][1]);
    }
}

struct ConsumerTurns {
  Turn slot, scales, digits, sums;
};

// Unit `unit` of every tile: the batches of columns whose number modulo SHARES is `share`.
template <class P>
__device__ __forceinline__ void multiply_rows(const Decode& p, const Routes& routes, const RowsReady& ready, int share, int unit, u32 shared,
                                              ConsumerTurns& turn) {
  const int lane = threadIdx.x & 31, q = lane & 3, g = lane >> 2;
  const u32 barriers = shared + AT_BARRIERS;
  const u32 low_scales = P::scale_at(unit, g, 0), half_scales = P::scale_at(unit, g, 1) - low_scales;
  const u32 half_weights = (P::slot_row(g, 1) - P::slot_row(g, 0)) * P::STRIDE;
  const auto leave_digits = [&] {
    if (!AHEAD) return;
    if (lane == 0) barrier_arrive(barriers + AT_DIGITS_EMPTY + 8 * turn.digits.slot);
    turn.digits.advance(BUFFERS);
  };
  const auto load_factors = [&](Factor (&factors)[NT]) {
#pragma unroll
    for (int n = 0; n < NT; ++n) factors[n].load(shared + AT_FACTORS + (turn.digits.slot * ROWS + 4 * n + q) * 8);
  };
  int block = -1, part = -1;
  for (Walk<P> walk(routes.blocks); walk.next(); turn.scales.advance(SCALE_STAGES), turn.sums.advance(SUM_STAGES)) {
    if (walk.block != block && !(P::PAIRS && routes.together)) {
      if (block >= 0) leave_digits();
      if (block < 0 || !AHEAD) {
        const u32 thread = threadIdx.x - HELPERS * 32;
        if (!P::PAIRS && walk.part() != part) ready.wait<2, CONSUMERS * 32>(part = walk.part(), thread);
        // Starts with a barrier of theirs: nobody reads the digits of before. 8 pieces at once, with four rows 4: measured.
        make_digits_of<P, 2, CONSUMERS * 32, (NT > 1 ? 8 : 4)>(p, routes, walk.block, thread, shared, turn.digits.slot);
        team_sync<2, CONSUMERS * 32>();
      }
      block = walk.block;
      if (AHEAD) barrier_wait(barriers + AT_DIGITS_FULL + 8 * turn.digits.slot, turn.digits.parity);
    }
    const u32 digits = digits_operand(shared + AT_DIGITS + turn.digits.slot * DIGITS);
    const u32 scales = shared + AT_SCALES + turn.scales.slot * SCALES + P::skew(walk.first) + low_scales;
    float sum[NT][2] = {};
    Factor factors[NT];
    if (!MXK_SCALES_SMALL) load_factors(factors);
    int batch = share;
#pragma unroll 1
    for (int chunk = 0; chunk < P::CHUNKS; ++chunk, turn.slot.advance(STAGES)) {
      const u32 weights = shared + turn.slot.slot * SLOT + (UNIT * unit + P::slot_row(g, 0)) * P::STRIDE + q * 4;
      const int first = chunk * P::CHUNK_BATCHES, end = min(first + P::CHUNK_BATCHES, P::BATCHES);
      barrier_wait(barriers + AT_SLOT_FULL + 8 * turn.slot.slot, turn.slot.parity);
#pragma unroll 1
      for (; batch < end; batch += SHARES)
        multiply_batch<P>(weights + (batch - first) * (P::BATCH * 16), half_weights, scales + batch * P::BATCH, half_scales,
                          digits + batch * (P::BATCH * DIGITS_STEP), batch == P::BATCHES - 1, factors, sum);
      __syncwarp();
      if (lane == 0) barrier_arrive(barriers + AT_SLOT_EMPTY + 8 * turn.slot.slot);
    }
    if (lane == 0) barrier_arrive(barriers + AT_SCALES_EMPTY + 8 * turn.scales.slot);
    barrier_wait(barriers + AT_SUMS_EMPTY + 8 * turn.sums.slot, turn.sums.parity ^ 1);
    load_factors(factors);
#pragma unroll
    for (int n = 0; n < NT; ++n)
      store_shared_8(shared + AT_SUMS + turn.sums.slot * SUM_SET + (share * TILE_UNITS + unit) * SUM + n * 256 + lane * 8,
                     factors[n].end(sum[n][0]), factors[n].end(sum[n][1]));
    __syncwarp();
    if (lane == 0) barrier_arrive(barriers + AT_SUMS_FULL + 8 * turn.sums.slot);
  }
  if (block >= 0) leave_digits();
}
