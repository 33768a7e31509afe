// The decode kernel's activations: rows of an expert, two FP8 digits a value, as the products' B operand.
#pragma once
#include "decode_ring.cuh"

// A row of bf16 is multiplied by a power of two that takes its largest value into [128, 256), its scale. A value of
// eight significant bits is hi + lo / 16, each an E4M3 of four: exact from 2^-13 of the largest on, below with an error of up to
// 2^-22 of it (docs/adr/0010-fp8-digits.md).
//
// B operand of a step of 32 columns: for each tile of 4 rows, two core matrices of 8 x 16 bytes, of the even and the odd
// columns, as the weights' nibbles lie; matrix row 2r is hi of row r, 2r + 1 lo, which meet in one lane of the product.
__device__ __forceinline__ u32 digits_at(int row, int group) { return group * (256 * NT) + row / 4 * 256 + row % 4 * 32; }

__device__ __forceinline__ u32 greater_halves(u32 a, u32 b) {
  u32 d;
  asm("max.u16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ u32 pack_e4m3x2(float low, float high) {
  u16 d;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
  return d;
}

__device__ __forceinline__ u32 largest_of(const uint4& v) {  // magnitude bits
  const u32 m = greater_halves(greater_halves(v.x & 0x7FFF7FFFu, v.y & 0x7FFF7FFFu),
                               greater_halves(v.z & 0x7FFF7FFFu, v.w & 0x7FFF7FFFu));
  return max(m & 0xFFFF, m >> 16);
}
__device__ __forceinline__ void store_digits(u32 to, const uint4& v, float scale) {
  const float low_scale = scale * 16.0f;
  const u32 words[4] = {v.x, v.y, v.z, v.w};
  u32 even[2] = {}, odd[2] = {};  // hi, lo
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const u32 hi0 = words[j] & 0xFFF0FFF0u, hi1 = words[j + 1] & 0xFFF0FFF0u;
    const u32 lo0 = subtract_bf16x2(words[j], hi0), lo1 = subtract_bf16x2(words[j + 1], hi1);
    const auto first = [](u32 pair) { return __uint_as_float(pair << 16); };
    const auto second = [](u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); };
    even[0] |= pack_e4m3x2(first(hi0) * scale, first(hi1) * scale) << (8 * j);
    even[1] |= pack_e4m3x2(first(lo0) * low_scale, first(lo1) * low_scale) << (8 * j);
    odd[0] |= pack_e4m3x2(second(hi0) * scale, second(hi1) * scale) << (8 * j);
    odd[1] |= pack_e4m3x2(second(lo0) * low_scale, second(lo1) * low_scale) << (8 * j);
  }
#pragma unroll
  for (int d = 0; d < 2; ++d) store_shared_4(to + 16 * d, even[d]), store_shared_4(to + 128 + 16 * d, odd[d]);
}

// Exponent of the scale of a row whose largest magnitude has these bits, as fp32 has it. Capped: values of 2^-133 in a row
// that has none above 2^-117 are lost.
__device__ __forceinline__ u32 scale_exponent(u32 largest) { return min(261 - (largest >> 7), 250u); }

// The digits of `count` rows, by a team of warps with a barrier of its own: 8 values a thread at a time. Rows that
// fit into registers are read once, longer ones twice.
template <class P, int BARRIER, int THREADS_, int HELD, class Row>
__device__ __forceinline__ void make_digits(int count, const Row& row, u32 thread, u32 shared, u32 buffer) {
  constexpr int EIGHTS = P::GROUPS * 4, STEPS = (EIGHTS + THREADS_ - 1) / THREADS_;  // of a row
  constexpr int WHOLE = HELD / STEPS, AT_ONCE = WHOLE > 0 ? WHOLE * STEPS : HELD;  // rows that registers hold whole
  const int items = count * STEPS;
  const u32 to = shared + AT_DIGITS + buffer * DIGITS;
  const u32 largest = shared + AT_LARGEST + buffer * (ROWS * 4), factors = shared + AT_FACTORS + buffer * (ROWS * 8);
  uint4 held[HELD];
  const auto row_of = [&](int item) { return item / STEPS; };
  const auto eight_of = [&](int item) { return item % STEPS * THREADS_ + static_cast<int>(thread); };
  const auto there = [&](int item) { return item < items && eight_of(item) < EIGHTS; };
  const auto load = [&](int base) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      held[i] = make_uint4(0, 0, 0, 0);
      if (there(base + i)) held[i] = load_eight(row(row_of(base + i)) + eight_of(base + i) * 16, MXK_X_ALIGNED || !P::PAIRS);
    }
  };
  const auto reduce = [&](int base) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (base + i >= items) continue;
      const u32 most = __reduce_max_sync(~0u, largest_of(held[i]));
      if ((thread & 31) == 0) max_shared(largest + row_of(base + i) * 4, most);
    }
  };
  const auto store = [&](int base) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (!there(base + i)) continue;
      const u32 most = load_shared_4(largest + row_of(base + i) * 4);
      const int eight = eight_of(base + i);
      store_digits(to + digits_at(row_of(base + i), eight / 4) + eight % 4 * 4, held[i],
                   __uint_as_float(scale_exponent(most) << 23));
    }
  };
  load(0);
  if (thread < ROWS) store_shared_4(largest + thread * 4, 0);
  team_sync<BARRIER, THREADS_>();
  if constexpr (WHOLE > 0) {
#pragma unroll 1
    for (int base = 0; base < items; base += AT_ONCE) {
      if (base > 0) load(base);
      reduce(base);
      team_sync<BARRIER, THREADS_>();
      store(base);
    }
  } else {
    for (int base = 0; base < items; base += AT_ONCE) {
      if (base > 0) load(base);
      reduce(base);
    }
    team_sync<BARRIER, THREADS_>();
    for (int base = 0; base < items; base += AT_ONCE) {
      load(base);
      store(base);
    }
  }
  if (thread < ROWS) {
    const u32 most = load_shared_4(largest + thread * 4);
    const int exponent = (MXK_SCALES_SMALL ? 69 : 133) - static_cast<int>(scale_exponent(most));
    const u32 half = exponent >> 1, rest = exponent - (exponent >> 1);
    // A row of NaN gives NaN; one of inf makes `finish_unit` look closer.
    store_shared_4(factors + thread * 8, most > 0x7F80 ? 0x7FC00000u : most == 0x7F80 ? 0x7F800000u : (half + 127) << 23);
    store_shared_4(factors + thread * 8 + 4, (rest + 127) << 23);
  }
  // Columns past the end must be finite: the weights there are whatever the slot holds.
  for (u32 at = P::GROUPS * (256 * NT) + thread * 4; at < P::DIGITS; at += THREADS_ * 4) store_shared_4(to + at, 0);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Those of a column block.
template <class P, int BARRIER, int THREADS_, int HELD>
__device__ __forceinline__ void make_digits_of(const Decode& p, const Routes& routes, int block, u32 thread, u32 shared, u32 buffer) {
  const int first = routes.first[block];
  make_digits<P, BARRIER, THREADS_, HELD>(
      routes.count[block], [&](int i) { return activations<P>(p, routes.at(first + i)); }, thread, shared, buffer);
}

// Those of all tokens, where they are few, before the routes are known: the way of x from memory is not added to the ids', and
// the stream of weights does not stand in it yet.
__device__ __forceinline__ void make_digits_of_tokens(const Decode& p, u32 thread, u32 shared) {
  make_digits<GateUp, 2, CONSUMERS * 32, 8>(
      p.tokens, [&](int token) { return activations<GateUp>(p, token * TOP_K); }, thread, shared, 0);
}

constexpr u32 TEAM = DIGIT_WARPS * 32;

// With AHEAD all column blocks of a phase but its first, which the consumers make themselves, since they have nothing to do yet.
template <class P>
__device__ __forceinline__ void make_more_digits(const Decode& p, const Routes& routes, const RowsReady& ready, u32 thread, u32 shared,
                                                 Turn& turn) {
  const u32 barriers = shared + AT_BARRIERS;
  if (!AHEAD || (P::PAIRS && routes.together)) return;
  int block = -1, part = -1;
  for (Walk<P> walk(routes.blocks); walk.next();) {
    if (walk.block == block) continue;
    barrier_wait(barriers + AT_DIGITS_EMPTY + 8 * turn.slot, turn.parity ^ 1);
    if (block >= 0) {
      if (!P::PAIRS && walk.part() != part) ready.wait<3, TEAM>(part = walk.part(), thread);
      make_digits_of<P, 3, TEAM, 4>(p, routes, walk.block, thread, shared, turn.slot);
    }
    block = walk.block;
    __syncwarp();
    if ((thread & 31) == 0) barrier_arrive(barriers + AT_DIGITS_FULL + 8 * turn.slot);
    turn.advance(BUFFERS);
  }
}
