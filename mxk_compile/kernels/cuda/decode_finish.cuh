// The decode kernel's ends: partial sums of the consumers in fixed order, activation or router weight, routes to tokens.
#pragma once
#include "decode_ring.cuh"

// ---- epilogue

// The slots that are this epilogue warp's turn.
template <class P>
struct Finish {
  Walk<P> walk;
  Turn sums, at;  // at: of this slot
  u32 turn;
  float bias[P::TILES][2];

  __device__ Finish(const Routes& routes, Turn sums, u32 turn) : walk(routes.blocks), sums(sums), turn(turn) {}
  // The next one and its biases, whose way from memory is long.
  __device__ bool next(const Decode& p, const Routes& routes, u32 warp) {
    while (walk.next()) {
      at = sums;
      sums.advance(PARTIALS);
      const bool mine = turn == warp;
      turn = turn + 1 == EPILOGUE ? 0 : turn + 1;
      if (mine) {
        load(p, routes.expert[walk.block]);
        return true;
      }
    }
    return false;
  }
  __device__ void load(const Decode& p, int expert) {
    const Operand& from = P::PAIRS ? p.b13 : p.b2;
    const int g = (threadIdx.x & 31) >> 2;
#pragma unroll
    for (int tile = 0; tile < P::TILES; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int unit = P::unit(tile, g, half), at = walk.first + unit;
        bias[tile][half] = 0.0f;
        if (!from.present() || unit >= walk.count) continue;
        if (!P::PAIRS) {
          bias[tile][half] = load_float(from.expert(expert), at, p.b2_dtype);
        } else {
          const int row = MXK_INTERLEAVED ? 2 * at + half : at + (half ? p.up_row : p.gate_row);
          bias[tile][half] = load_float(from.expert(expert + (half ? p.up_expert : 0)), row, p.b13_dtype);
        }
      }
  }
};

template <class P>
__device__ __forceinline__ void finish_slot(const Decode& p, const Routes& routes, const Finish<P>& slot, u32 shared) {
  const int lane = threadIdx.x & 31, q = lane & 3, g = lane >> 2;
  const Walk<P>& walk = slot.walk;
  const int expert = routes.expert[walk.block], first = routes.first[walk.block], count = routes.count[walk.block];
#pragma unroll
  for (int tile = 0; tile < P::TILES; ++tile) {
    if (tile * (P::PAIRS ? 8 : 16) >= walk.count) break;
    const int unit[2] = {P::unit(tile, g, 0), P::unit(tile, g, 1)};
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      if (8 * n >= count) break;
      const u32 at = shared + AT_PARTIALS + slot.at.slot * PARTIAL_SET + (tile * NT + n) * PARTIAL + lane * 16;
      float c[4] = {};
#pragma unroll
      for (int w = 0; w < W; ++w) {
        const uint4 v = load_shared_16(at + w * 512);
        c[0] += __uint_as_float(v.x), c[1] += __uint_as_float(v.y), c[2] += __uint_as_float(v.z), c[3] += __uint_as_float(v.w);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = 8 * n + 2 * q + i;
        if (column >= count) break;
        const int route = routes.route[first + column];
        const float low = c[i] + slot.bias[tile][0], high = c[2 + i] + slot.bias[tile][1];
        if constexpr (P::PAIRS) {
          if (unit[0] < walk.count)
            reinterpret_cast<u16*>(p.h)[static_cast<i64>(route) * I + walk.first + unit[0]] =
                static_cast<u16>(pack_bf16x2(activate(low, high, p.activation, p.alpha, p.limit), 0.0f));
        } else {
          const float weight = routes.weight[route];
          const i64 to = static_cast<i64>(route) * K + walk.first;
          if constexpr (MXK_PER_ROUTE) {
            u16* out = reinterpret_cast<u16*>(p.out);
            if (unit[0] < walk.count) out[to + unit[0]] = static_cast<u16>(pack_bf16x2(low * weight, 0.0f));
            if (unit[1] < walk.count) out[to + unit[1]] = static_cast<u16>(pack_bf16x2(high * weight, 0.0f));
          } else {
            float* y = reinterpret_cast<float*>(p.y);
            if (unit[0] < walk.count) y[to + unit[0]] = low * weight;
            if (unit[1] < walk.count) y[to + unit[1]] = high * weight;
          }
        }
      }
    }
  }
}

template <class P>
__device__ __forceinline__ void finish_rows(const Decode& p, const Routes& routes, u32 warp, u32 shared, u32 sums_full,
                                            u32 sums_empty, Turn& sums, u32& turn) {
  Finish<P> slot(routes, sums, turn);
  bool more = slot.next(p, routes, warp);
  while (more) {
    Finish<P> ahead = slot;
    more = ahead.next(p, routes, warp);
    barrier_wait(sums_full + 8 * slot.at.slot, slot.at.parity);
    finish_slot<P>(p, routes, slot, shared);
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive(sums_empty + 8 * slot.at.slot);
    slot = ahead;
  }
  sums = slot.sums;
  turn = slot.turn;
}

// ---- routes to tokens

__device__ __forceinline__ void sum_slots(const Decode& p, const Routes& routes, u32 thread, u32 threads) {
  const u32 chunks = p.tokens * (K / 4);
  for (u32 i = blockIdx.x * threads + thread; i < chunks; i += gridDim.x * threads) {
    const int token = i / (K / 4), at = i % (K / 4) * 4;
    uint4 v[TOP_K];
#pragma unroll
    for (int s = 0; s < TOP_K; ++s) {
      const int route = token * TOP_K + s;
      v[s] = make_uint4(0, 0, 0, 0);
      if (routes.expert_of[route] != NOT_HERE) v[s] = load_l2(p.y + (static_cast<i64>(route) * K + at) * 4);
    }
    float sum[4] = {};
#pragma unroll
    for (int s = 0; s < TOP_K; ++s) {
      sum[0] += __uint_as_float(v[s].x), sum[1] += __uint_as_float(v[s].y);
      sum[2] += __uint_as_float(v[s].z), sum[3] += __uint_as_float(v[s].w);
    }
    reinterpret_cast<uint2*>(p.out)[i] = make_uint2(pack_bf16x2(sum[0], sum[1]), pack_bf16x2(sum[2], sum[3]));
  }
}

// Rows of routes that go to no expert here.
__device__ __forceinline__ void clear_absent(const Decode& p, const Routes& routes, u32 thread, u32 threads) {
  for (int r = blockIdx.x; r < p.tokens * TOP_K; r += gridDim.x) {
    if (routes.expert_of[r] != NOT_HERE) continue;
    for (u32 i = thread; i < K / 4; i += threads)
      reinterpret_cast<uint2*>(p.out)[static_cast<i64>(r) * (K / 4) + i] = make_uint2(0, 0);
  }
}
