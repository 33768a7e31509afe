// The decode kernel's products: 16 weight rows unpacked in registers, times 8 activation rows a tensor-core instruction.
#pragma once
#include "decode_ring.cuh"

// ---- E2M1 and E8M0

// Nibbles j and j + 4 of a word, j = 0..3, as bf16 pairs of value * 2^-126. One product places a nibble twice: exponent
// and mantissa at bits 8..6, the sign at 15.
__device__ __forceinline__ void unpack(u32 word, u32 (&pair)[4]) {
  const u32 upper = word >> 8;
  pair[0] = ((word & 0x000F000Fu) * 0x1040u) & 0x81C081C0u;
  pair[1] = ((word & 0x00F000F0u) * 0x0104u) & 0x81C081C0u;
  pair[2] = ((upper & 0x000F000Fu) * 0x1040u) & 0x81C081C0u;
  pair[3] = ((upper & 0x00F000F0u) * 0x0104u) & 0x81C081C0u;
}
// What `scaled` takes for an E8M0 byte, twice.
__device__ __forceinline__ u32 scale_pair(u32 byte) {
  if constexpr (MXK_SCALES_SMALL) return byte * 0x00800080u + 126u * 0x00800080u;  // 2^(byte - 1)
  const u32 bits = byte == 0 ? 0x0040u : byte == 255 ? 0x7FC0u : byte << 7;       // 2^(byte - 127), subnormal for 0
  return bits * 0x00010001u;
}
__device__ __forceinline__ u32 scaled(u32 pair, u32 scale) {
  if constexpr (MXK_SCALES_SMALL) return multiply_bf16x2(pair, scale);
  return multiply_bf16x2(multiply_bf16x2(pair, 0x7E807E80u), scale);  // 2^126: the element itself
}

// ---- consumers

template <class P>
__device__ __forceinline__ void load_activations(const Decode& p, const Routes& routes, int block, int warp,
                                                 u32 (&b)[P::STEPS_A_WARP][NT][16]) {
  const int lane = threadIdx.x & 31, q = lane & 3, g = lane >> 2;
  const int first = routes.first[block], count = routes.count[block];
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const int column = 8 * n + g;
    const bool here = column < count;
    const int route = here ? routes.route[first + column] : 0;
    const u8* row = P::PAIRS ? p.x + static_cast<i64>(route / TOP_K) * p.x_stride * 2 : p.h + static_cast<i64>(route) * (I * 2);
#pragma unroll
    for (int s = 0; s < P::STEPS_A_WARP; ++s) {
      const int group = 4 * (s * W + warp) + q;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (here && group < P::GROUPS) {
          const u8* from = row + group * 64 + j * 16;
          if (MXK_X_ALIGNED || !P::PAIRS) {
            v = load_l2(from);
          } else {
            const u16* e = reinterpret_cast<const u16*>(from);
            v.x = e[0] | e[1] << 16, v.y = e[2] | e[3] << 16, v.z = e[4] | e[5] << 16, v.w = e[6] | e[7] << 16;
          }
        }
        b[s][n][4 * j] = pick_bytes(v.x, v.z, 0x5410);  // columns 0, 4 of the 8; then 1, 5; 2, 6; 3, 7: as `unpack`
        b[s][n][4 * j + 1] = pick_bytes(v.x, v.z, 0x7632);
        b[s][n][4 * j + 2] = pick_bytes(v.y, v.w, 0x5410);
        b[s][n][4 * j + 3] = pick_bytes(v.y, v.w, 0x7632);
      }
    }
  }
}

// 16 rows of a slot times this warp's columns.
template <class P>
__device__ __forceinline__ void multiply_tile(u32 slot, int tile, u32 skew, int warp, const u32 (&b)[P::STEPS_A_WARP][NT][16],
                                              float (&c)[NT][2][4]) {
  const int lane = threadIdx.x & 31, q = lane & 3, g = lane >> 2;
  const u32 weights = slot + P::slot_row(tile, g, 0) * P::STRIDE + (4 * warp + q) * 16;
  const u32 low = slot + ScalePlace<P>::at(tile, g, 0) + skew + 4 * warp + q;
  const u32 high = slot + ScalePlace<P>::at(tile, g, 1) + skew + 4 * warp + q;
  constexpr int HALF = (P::WHOLE ? 1 : 8) * P::STRIDE;
  uint4 words[2][2];
  u32 bytes[2][2];
  // Step s of this warp is s * W + warp of the row: only the last may lie past its end.
  const auto there = [&](int s) { return (s + 1) * W <= P::STEPS || s * W + warp < P::STEPS; };
  const auto fetch = [&](int s) {
    words[s & 1][0] = load_shared_16(weights + s * W * 64);
    words[s & 1][1] = load_shared_16(weights + s * W * 64 + HALF);
    bytes[s & 1][0] = load_shared_byte(low + s * W * 4);
    bytes[s & 1][1] = load_shared_byte(high + s * W * 4);
  };
  if (there(0)) fetch(0);
#pragma unroll
  for (int s = 0; s < P::STEPS_A_WARP; ++s) {
    if (!there(s)) continue;
    if (s + 1 < P::STEPS_A_WARP && there(s + 1)) fetch(s + 1);
    u32 scale_low = scale_pair(bytes[s & 1][0]), scale_high = scale_pair(bytes[s & 1][1]);
    // Past the end of the row: 0 times whatever is there, which `unpack` makes finite.
    if ((s + 1) * W * 4 > P::GROUPS && 4 * (s * W + warp) + q >= P::GROUPS) scale_low = scale_high = 0;
    const uint4 &l = words[s & 1][0], &h = words[s & 1][1];
    const u32 low_words[4] = {l.x, l.y, l.z, l.w}, high_words[4] = {h.x, h.y, h.z, h.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 low_pairs[4], high_pairs[4];
      unpack(low_words[j], low_pairs);
      unpack(high_words[j], high_pairs);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 a[4] = {scaled(low_pairs[2 * i], scale_low), scaled(high_pairs[2 * i], scale_high),
                          scaled(low_pairs[2 * i + 1], scale_low), scaled(high_pairs[2 * i + 1], scale_high)};
#pragma unroll
        for (int n = 0; n < NT; ++n) multiply(c[n][i], a, b[s][n][4 * j + 2 * i], b[s][n][4 * j + 2 * i + 1]);
      }
    }
  }
}

template <class P>
__device__ __forceinline__ void multiply_rows(const Decode& p, const Routes& routes, int group, int warp, u32 shared, u32 full,
                                              u32 empty, u32 sums_full, u32 sums_empty, Turn& turn, Turn& sums, int& next_group) {
  const int lane = threadIdx.x & 31;
  u32 b[P::STEPS_A_WARP][NT][16];
  int block = -1;
  for (Walk<P> walk(routes.blocks); walk.next(); turn.advance(STAGES), sums.advance(PARTIALS)) {
    if (GROUPS > 1) {
      const bool mine = next_group == group;
      next_group ^= 1;
      if (!mine) continue;
    }
    if (walk.block != block) load_activations<P>(p, routes, block = walk.block, warp, b);
    const u32 slot = shared + turn.slot * SLOT;
    const u32 to = shared + AT_PARTIALS + sums.slot * PARTIAL_SET + warp * 512 + lane * 16;
    barrier_wait(full + 8 * turn.slot, turn.parity);
#pragma unroll 1
    for (int tile = 0; tile < P::TILES; ++tile) {
      float c[NT][2][4] = {};
      multiply_tile<P>(slot, tile, ScalePlace<P>::skew(walk.first), warp, b, c);
      if (tile == P::TILES - 1) {  // the slot is read
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * turn.slot);
      }
      if (tile == 0) barrier_wait(sums_empty + 8 * sums.slot, sums.parity ^ 1);
#pragma unroll
      for (int n = 0; n < NT; ++n)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + (tile * NT + n) * PARTIAL),
                     "f"(c[n][0][0] + c[n][1][0]), "f"(c[n][0][1] + c[n][1][1]), "f"(c[n][0][2] + c[n][1][2]),
                     "f"(c[n][0][3] + c[n][1][3])
                     : "memory");
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(sums_full + 8 * sums.slot);
  }
}
