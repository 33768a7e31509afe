// The decode kernel's ends: partial sums in fixed order, bias, activation or router weight, and routes to tokens.
#pragma once
#include "decode_ring.cuh"

// ---- routes to tokens

// By all who multiplied or finished, when all blocks have stored their rows of Y: each block adds up as many columns as the
// others, over slots in order. Counting who stores a column last would leave the last block nearly all of them.
constexpr int ADDERS = (EPILOGUE + CONSUMERS) * 32;
__device__ __forceinline__ void add_slots(const Decode& p, const Routes& routes, const RowsReady& ready) {
  const u32 thread = threadIdx.x - (1 + DIGIT_WARPS) * 32;
  constexpr int SLOTS = lesser(TOP_K, 8);  // in flight
  const int items = p.tokens * (K / 4), step = gridDim.x * ADDERS;
  team_sync<6, ADDERS>();
  if (thread == 0) ready.arrive(RowsReady::OF_Y);  // releases what the others wrote before the sync
  if (static_cast<int>(blockIdx.x * ADDERS) >= items) return;
  ready.wait<6, ADDERS>(RowsReady::OF_Y, thread);
  for (int item = blockIdx.x * ADDERS + thread; item < items; item += step) {
    const int token = item / (K / 4);
    const u8* y = p.y + (static_cast<i64>(token) * TOP_K * K + (item - token * (K / 4)) * 4) * 4;
    float sum[4] = {};
#pragma unroll 1
    for (int slot = 0; slot < TOP_K; slot += SLOTS) {
      uint4 v[SLOTS];
#pragma unroll
      for (int s = 0; s < SLOTS; ++s) {
        v[s] = make_uint4(0, 0, 0, 0);
        if (slot + s < TOP_K && routes.expert_of[token * TOP_K + slot + s] != NOT_HERE) v[s] = load_l2(y + (slot + s) * (K * 4));
      }
#pragma unroll
      for (int s = 0; s < SLOTS; ++s) {
        sum[0] += __uint_as_float(v[s].x), sum[1] += __uint_as_float(v[s].y);
        sum[2] += __uint_as_float(v[s].z), sum[3] += __uint_as_float(v[s].w);
      }
    }
    *reinterpret_cast<uint2*>(p.out + static_cast<i64>(item) * 8) = make_uint2(pack_bf16x2(sum[0], sum[1]), pack_bf16x2(sum[2], sum[3]));
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

// Four rows of an expert a step, several side by side: one alone waits at every turn.
constexpr int ABREAST = NT % 4 == 0 ? 4 : NT % 3 == 0 ? 3 : NT % 2 == 0 ? 2 : 1;

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
    if (unit < walk.count) finish_unit<P>(p, routes, walk, unit, shared + AT_SUMS + turn.slot * SUM_SET, bias);
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive(shared + AT_BARRIERS + AT_SUMS_EMPTY + 8 * turn.slot);
    if (P::PAIRS && !(more && ahead.part() == walk.part())) {
      team_sync<1, EPILOGUE * 32>();
      arrive(ahead);  // releases what the others wrote before the sync
    }
    turn.advance(SUM_STAGES);
    walk = ahead, unit = next_unit;
    bias[0] = next_bias[0], bias[1] = next_bias[1];
  }
}

// With PER_ROUTE: rows of routes whose experts are not here.
__device__ __forceinline__ void clear_absent(const Decode& p, const Routes& routes, u32 thread, u32 threads) {
  for (int r = blockIdx.x; r < p.tokens * TOP_K; r += gridDim.x) {
    if (routes.expert_of[r] != NOT_HERE) continue;
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
