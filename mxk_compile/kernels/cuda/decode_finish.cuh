// The decode kernel's ends: partial sums in fixed order, bias, activation or router weight, and routes to tokens.
#pragma once
#include "decode_ring.cuh"

// ---- routes to tokens

// Units of 16 output columns of a column block that a warp has stored and not counted yet: the i-th in lane i. Counting
// waits for the stores' and the counter's ways to the L2, longer than a short tile takes, so it is done for several at once.
struct Stored {
  static constexpr int MOST = 4;
  int unit = 0, count = 0;

  __device__ void add(int stored) {
    if ((threadIdx.x & 31) == count) unit = stored;
    ++count;
  }
};

// Counts them; whoever brings the last column block of a unit adds its columns up, over slots in order, for every token.
__device__ __forceinline__ void sum_if_last(const Decode& p, const Routes& routes, Stored& stored) {
  const int lane = threadIdx.x & 31;
  u32* counter = p.counters + COUNTERS_AT + stored.unit;
  bool last = false;
  __syncwarp();
  if (lane < stored.count) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    last = before == static_cast<u32>(routes.blocks) - 1;
    if (last) *counter = 0;  // as the next launch wants it
  }
  stored.count = 0;
  const u32 lasts = __ballot_sync(~0u, last);
  __syncwarp();  // what those lanes acquired, for all
  constexpr int SLOTS = lesser(TOP_K, 4), TOKENS = 2;  // in flight
  const int items = __popc(lasts) * p.tokens;          // tokens of a unit, four lanes each
  for (int base = 0; base < items; base += 8 * TOKENS) {
    float sum[TOKENS][4] = {};
    int token[TOKENS], at[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      const int item = base + 8 * t + lane / 4, which = item / p.tokens;
      u32 left = lasts;
      for (int i = 0; i < which && i < Stored::MOST; ++i) left &= left - 1;
      token[t] = left != 0 ? item - which * p.tokens : p.tokens;  // past the end
      at[t] = __shfl_sync(~0u, stored.unit, left != 0 ? __ffs(left) - 1 : 0) * 16 + lane % 4 * 4;
    }
#pragma unroll 1
    for (int slot = 0; slot < TOP_K; slot += SLOTS) {
      uint4 v[TOKENS][SLOTS];
#pragma unroll
      for (int t = 0; t < TOKENS; ++t)
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
          const int route = token[t] * TOP_K + slot + s;
          v[t][s] = make_uint4(0, 0, 0, 0);
          if (token[t] < p.tokens && slot + s < TOP_K && routes.expert_of[route] != NOT_HERE)
            v[t][s] = load_l2(p.y + (static_cast<i64>(route) * K + at[t]) * 4);
        }
#pragma unroll
      for (int t = 0; t < TOKENS; ++t)
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
          sum[t][0] += __uint_as_float(v[t][s].x), sum[t][1] += __uint_as_float(v[t][s].y);
          sum[t][2] += __uint_as_float(v[t][s].z), sum[t][3] += __uint_as_float(v[t][s].w);
        }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
      if (token[t] < p.tokens)
        *reinterpret_cast<uint2*>(p.out + (static_cast<i64>(token[t]) * K + at[t]) * 2) =
            make_uint2(pack_bf16x2(sum[t][0], sum[t][1]), pack_bf16x2(sum[t][2], sum[t][3]));
  }
}

// ---- epilogue: a warp a unit of every tile

template <class P>
__device__ __forceinline__ void load_bias(const Decode& p, const Routes& routes, const Walk<P>& walk, int unit, float (&bias)[2]) {
  const Operand& from = P::PAIRS ? p.b13 : p.b2;
  const int expert = routes.expert[walk.block], g = (threadIdx.x & 31) >> 2;
  bias[0] = bias[1] = 0.0f;
  if (!from.present() || unit >= walk.count) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = (walk.first + unit) * P::UNIT_OUTPUTS + g;
    if (!P::PAIRS) {
      bias[half] = load_float(from.expert(expert), at + 8 * half, p.b2_dtype);
    } else {
      const int row = MXK_INTERLEAVED ? 2 * at + half : at + (half ? p.up_row : p.gate_row);
      bias[half] = load_float(from.expert(expert + (half ? p.up_expert : 0)), row, p.b13_dtype);
    }
  }
}

// Scale, in fp32, of column `column` of a row; value of a code there, without it.
__device__ __forceinline__ float plain_scale(const u8* scales, int column) {
  if constexpr (IS_MXFP4) {
    const u32 byte = scales[column / 32];
    return __uint_as_float(byte == 0 ? 0x00400000u : byte == 255 ? 0x7FC00000u : byte << 23);
  }
  return load_float(scales, GROUP_LOG == 31 ? 0 : column >> GROUP_LOG, MXK_SCALES);
}
__device__ __forceinline__ float plain_value(u32 code, const u8* zeros, int column) {
  // An E2M1 code as fp32: its exponent and mantissa at the low end of fp32's, which 2^126 undoes.
  if constexpr (IS_MXFP4) return __uint_as_float((code & 8) << 28 | (code & 7) << 22) * __uint_as_float(253u << 23);
  const int zero = MXK_ZEROS ? zeros[GROUP_LOG == 31 ? 0 : column >> GROUP_LOG] : 8;
  return static_cast<float>(static_cast<int>(MXK_FORMAT == 2 ? code ^ 8 : code) - zero);
}

// A product in plain fp32, by a warp: where an activation is infinite, which FP8 digits cannot say, or a sum overflowed.
template <class P>
__device__ __forceinline__ float plain_product(const Decode& p, const Source<P>& from, i64 row, int half, int route) {
  const u8* weights = from.weights(half) + row * from.row_stride;
  const u8* scales = from.scales(half) + row * from.scale_stride;
  const u8* zeros = nullptr;
  if constexpr (MXK_ZEROS) zeros = from.zeros(half) + row * P::ROW_SCALES;
  const u16* x = reinterpret_cast<const u16*>(activations<P>(p, route));
  float sum = 0.0f;
  for (int at = threadIdx.x & 31; at < P::BYTES; at += 32) {
    const float scale = plain_scale(scales, 2 * at);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      u16 value;  // volatile: as H was written by other blocks
      asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(value) : "l"(x + 2 * at + i) : "memory");
      sum += plain_value(weights[at] >> (4 * i) & 15, zeros, 2 * at) * scale * __uint_as_float(static_cast<u32>(value) << 16);
    }
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  return sum;
}

// Four rows of an expert a step. INT4, which takes more rows at once, sums several side by side: one alone waits at every turn.
constexpr int ABREAST = IS_MXFP4 ? 1 : NT % 4 == 0 ? 4 : NT % 3 == 0 ? 3 : 2;

template <class P>
__device__ __forceinline__ void finish_unit(const Decode& p, const Routes& routes, const Walk<P>& walk, int unit, u32 sums,
                                            const float (&bias)[2]) {
  const int lane = threadIdx.x & 31, q = lane & 3, g = lane >> 2;
  const int expert = routes.expert[walk.block], first = routes.first[walk.block], count = routes.count[walk.block];
  const int output = (walk.first + unit) * P::UNIT_OUTPUTS + g;
#pragma unroll 1
  for (int base = 0; base < NT && 4 * base < count; base += ABREAST) {
    float values[ABREAST][2] = {};
    int of_row[ABREAST];
    const auto column_of = [&](int n) { return 4 * (base + n) + q; };
#pragma unroll
    for (int n = 0; n < ABREAST; ++n) of_row[n] = routes.at(first + (column_of(n) < count ? column_of(n) : 0));
    // Where a row's sums are: as many tokens as columns, or positions in the list.
    const auto sums_of = [&](int n) {
      const int token = of_row[n] / TOP_K;
      return P::PAIRS && routes.together ? token / 4 * 256 + (lane - q + token % 4) * 8 : (base + n) * 256 + lane * 8;
    };
#pragma unroll
    for (int share = 0; share < SHARES; ++share)
#pragma unroll
      for (int n = 0; n < ABREAST; ++n) {
        const uint2 part = load_shared_8(sums + (share * TILE_UNITS + unit) * SUM + sums_of(n));
        values[n][0] += __uint_as_float(part.x), values[n][1] += __uint_as_float(part.y);
      }
#pragma unroll
    for (int n = 0; n < ABREAST; ++n) {
      const bool here = column_of(n) < count;
      const int route = of_row[n];
      float (&value)[2] = values[n];
      if (P::PAIRED && g >= 4) {  // as `slot_row` has it
        const float low = value[0];
        value[0] = value[1], value[1] = low;
      }
      // With small scales NaN is an activation's, and right.
      const auto look = [](float v) {
        const u32 magnitude = __float_as_uint(v) & 0x7FFFFFFFu;
        return magnitude == 0x7F800000u || (!MXK_SCALES_SMALL && magnitude > 0x7F800000u);
      };
      for (u32 left = __ballot_sync(~0u, here && (look(value[0]) || look(value[1]))); left != 0; left &= left - 1) {
        const int of = __ffs(left) - 1;
        const Source<P> from(p, expert);
        for (int half = 0; half < 2; ++half) {
          const i64 row = from.row(walk.first + unit, of >> 2, half);
          const float plain = plain_product<P>(p, from, row, half, __shfl_sync(~0u, route, of));
          if (lane == of) value[half] = plain;
        }
      }
      if (!here) continue;
      value[0] += bias[0], value[1] += bias[1];
      if constexpr (P::PAIRS) {
        const float activated = activate(value[0], value[1], p.activation, p.alpha, p.limit);
        reinterpret_cast<u16*>(p.h)[static_cast<i64>(route) * I + output] = static_cast<u16>(pack_bf16x2(activated, 0.0f));
      } else {
        const float weight = PROJECT ? 1.0f : routes.weight[route];
        const i64 to = static_cast<i64>(route) * (PROJECT ? p.out_stride : K) + output;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if constexpr (MXK_PER_ROUTE || PROJECT) {
            reinterpret_cast<u16*>(p.out)[to + 8 * half] = static_cast<u16>(pack_bf16x2(value[half] * weight, 0.0f));
          } else {
            reinterpret_cast<float*>(p.y)[to + 8 * half] = value[half] * weight;
          }
        }
      }
    }
  }
}

// The unit of a tile that is this warp's: every EPILOGUE-th of an expert.
template <class P>
__device__ __forceinline__ int unit_of(const Walk<P>& walk, int warp) {
  return TILE_UNITS == EPILOGUE ? warp : (warp + EPILOGUE - walk.first % EPILOGUE) % EPILOGUE;
}

template <class P>
__device__ __forceinline__ void finish_rows(const Decode& p, const Routes& routes, const RowsReady& ready, int warp, u32 shared, Turn& turn) {
  static_assert(TILE_UNITS <= EPILOGUE, "a warp has one unit of a tile at most");
  Walk<P> walk(routes.blocks);
  Stored stored;
  bool more = walk.next();
  int part = 0;  // the first whose rows of H are not all stored
  const auto arrive = [&](const Walk<P>& next) {
    const int end = more ? next.part() : PARTS;
    if (warp == 0 && (threadIdx.x & 31) == 0)
      for (; part < end; ++part) ready.arrive(part);
    part = end;
  };
  if (P::PAIRS) arrive(walk);
  int unit = unit_of<P>(walk, warp), next_unit;
  float bias[2];
  if (more) load_bias<P>(p, routes, walk, unit, bias);
  while (more) {
    Walk<P> ahead = walk;  // its biases, whose way from memory is long
    float next_bias[2];
    more = ahead.next();
    next_unit = unit_of<P>(ahead, warp);
    if (more) load_bias<P>(p, routes, ahead, next_unit, next_bias);
    barrier_wait(shared + AT_BARRIERS + AT_SUMS_FULL + 8 * turn.slot, turn.parity);
    const bool mine = unit < walk.count;
    if (mine) finish_unit<P>(p, routes, walk, unit, shared + AT_SUMS + turn.slot * SUM_SET, bias);
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive(shared + AT_BARRIERS + AT_SUMS_EMPTY + 8 * turn.slot);
    if constexpr (!P::PAIRS && !MXK_PER_ROUTE && !PROJECT) {
      if (mine) stored.add(walk.first + unit);
      if (stored.count == Stored::MOST || (!more && stored.count > 0)) sum_if_last(p, routes, stored);
    }
    if (P::PAIRS && !(more && ahead.part() == walk.part())) {
      team_sync<1, EPILOGUE * 32>();
      arrive(ahead);  // releases what the others wrote before the sync
    }
    turn.advance(SUM_STAGES);
    walk = ahead, unit = next_unit;
    bias[0] = next_bias[0], bias[1] = next_bias[1];
  }
}

// Without their routes' experts: rows of routes with PER_ROUTE, and everything where no route is here at all.
__device__ __forceinline__ void clear_absent(const Decode& p, const Routes& routes, u32 thread, u32 threads) {
  constexpr int EACH = MXK_PER_ROUTE ? 1 : TOP_K;  // routes of a row of `out`
  if (!MXK_PER_ROUTE && routes.blocks != 0) return;
  for (int r = blockIdx.x; r < p.tokens * TOP_K / EACH; r += gridDim.x) {
    if (MXK_PER_ROUTE && routes.expert_of[r] != NOT_HERE) continue;
    for (u32 i = thread; i < K / 4; i += threads)
      reinterpret_cast<uint2*>(p.out)[static_cast<i64>(r) * (K / 4) + i] = make_uint2(0, 0);
  }
}

// By the epilogue's warps, for themselves: nobody else needs them, and nobody waits for them.
__device__ __forceinline__ void load_router(const Decode& p, u8* shared, u32 thread) {
  float* weight = reinterpret_cast<float*>(shared + AT_ROUTER);
  for (int r = thread; r < p.tokens * TOP_K; r += EPILOGUE * 32)
    weight[r] = load_float(p.router, r / TOP_K * p.router_stride[0] + r % TOP_K * p.router_stride[1], p.router_dtype);
  team_sync<1, EPILOGUE * 32>();
}
