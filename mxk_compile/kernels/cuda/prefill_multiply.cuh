// prefill.cu's consumers: packed weights to fragments, and the products of a tile's columns.
#pragma once
#if MXK_MULTIPLY == 0
#include "prefill_wgmma.cuh"
#elif MXK_MULTIPLY == 1
#include "prefill_mma.cuh"
#else
#include "prefill_tcgen05.cuh"
#endif

// BLOCK_OF_STAGE: 0 to SPAN - 1. Slots of units and halves are 32 rows apart.
template <int BLOCK_OF_STAGE>
__device__ __forceinline__ void multiply_block(Products& products, Sums& sum, Fragment (&fragment)[2], const Scales& scales,
                                               u32 stage, const Lane& lane, u32 used, bool leader, const Constants& constants) {
  u32 words[2][2][2];
  Scale ready[SCALE_PARTS][2][2];
#pragma unroll
  for (int unit = 0; unit < 2; ++unit) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int rows = (2 * unit + half) * 32;
      lane.load(words[unit][half], ((stage + lane.weights) ^ (BLOCK_OF_STAGE * PACKED_BYTES)) + rows * SPAN_BYTES);
      if constexpr (STAGED) {
        const u32 at = stage + lane.scales + rows * ROW_SCALES + 2 * SCALE_BYTES * BLOCK_OF_STAGE;
        const u32 both = IS_MXFP4 ? load_shared_2(at) : load_shared_4(at);
#pragma unroll
        for (int part = 0; part < SCALE_PARTS; ++part) {
          Scale& scale = ready[part][unit][half];
          scale.bits = __byte_perm(both, 0, lane.selector(part));
          if constexpr (IS_MXFP4) scale.bits = scale_pair(scale.bits);
          else if constexpr (MXK_SCALES == FP16) scale = make_ready(Scale{scale.bits & 0xFFFF, 0});
        }
      } else {
#pragma unroll
        for (int part = 0; part < SCALE_PARTS; ++part) ready[part][unit][half] = make_ready(scales.of[part][unit][half]);
      }
    }
  }
  const auto operand = Products::operand(stage + BLOCK_OF_STAGE * TOKEN_BYTES);
#pragma unroll
  for (int first = 0; first < 4; first += GROUP_STEPS) {
    products.wait(BLOCK_OF_STAGE == 0 && first == GROUP_STEPS && leader, used);
    Fragment& group = fragment[first / GROUP_STEPS & 1];
#pragma unroll
    for (int i = 0; i < GROUP_STEPS; ++i) {
      const int step = first + i;
#pragma unroll
      for (int unit = 0; unit < 2; ++unit) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const u32 word = words[unit][half][step / 2];
          const Scale& scale = ready[step / 2 * (SCALE_PARTS - 1)][unit][half];
          u32(&a)[4] = group[i][unit];
          a[half] = step & 1 ? unpack<2, NATURAL>(word, scale, constants) : unpack<0, NATURAL>(word, scale, constants);
          a[half + 2] = step & 1 ? unpack<3, NATURAL>(word, scale, constants) : unpack<1, NATURAL>(word, scale, constants);
        }
      }
    }
    products.run(sum, group, operand, first, leader);
  }
}

__device__ __forceinline__ void multiply(Products& products, Sums& sum, const Gemm& p, const ScaleRows& rows, int quarter,
                                         Ring ring, int slot, bool leader) {
  const Constants constants;
  const Lane lane(slot, quarter);
  Fragment fragment[2];
  Scales scales[2];
  rows.load(scales[0], 0, quarter);
  rows.load(scales[1], 1, quarter);
  products.begin(sum);
  u32 used = ~0u;  // empty-barrier of the stage before
#pragma unroll 1
  for (int block = 0; block < p.blocks; block += SPAN) {
    const u32 stage = ring.here();
    barrier_wait(ring.filled(), ring.parity);
    if constexpr (MXK_ROWS == LISTED) copies_to_products_fence();
    multiply_block<0>(products, sum, fragment, scales[0], stage, lane, used, leader, constants);
    rows.load(scales[0], block + 2, quarter);
    if (block + 1 < p.blocks) multiply_block<1>(products, sum, fragment, scales[1], stage, lane, used, leader, constants);
    rows.load(scales[1], block + 3, quarter);
    if constexpr (SPAN == 4) {
      if (block + 2 < p.blocks) multiply_block<2>(products, sum, fragment, scales[0], stage, lane, used, leader, constants);
      rows.load(scales[0], block + 4, quarter);
      if (block + 3 < p.blocks) multiply_block<3>(products, sum, fragment, scales[1], stage, lane, used, leader, constants);
      rows.load(scales[1], block + 5, quarter);
    }
    used = ring.emptied();
    products.leave(used, leader);
    ring.next();
  }
  products.finish(sum, used, leader);
}
