// prefill.cu's consumers: packed weights to fragments, and the products of a tile's columns.
#pragma once
#if MXK_MULTIPLY == 0
#include "prefill_wgmma.cuh"
#elif MXK_MULTIPLY == 1
#include "prefill_mma.cuh"
#else
#include "prefill_tcgen05.cuh"
#endif

// Staged scales of a stage, of a lane's rows: a word a row and pair of panels with E8M0 bytes, else a word a panel.
struct StagedScales {
  static constexpr int WORDS = STAGED ? ROW_SCALES / 4 : 1;
  u32 of[UNITS][2][WORDS];

  __device__ __forceinline__ void load(u32 at) {
    if constexpr (STAGED) {
#pragma unroll
      for (int unit = 0; unit < UNITS; ++unit) {
#pragma unroll
        for (int half = 0; half < 2; ++half) load_shared<WORDS>(of[unit][half], at + (2 * unit + half) * 32 * ROW_SCALES);
      }
    }
  }
  // Of a panel of the stage, made ready.
  __device__ __forceinline__ Scale ready(int unit, int half, int panel, u32 selector) const {
    const u32* words = of[unit][half];
    if constexpr (IS_MXFP4) {
      return {scale_pair(__byte_perm(words[panel / 2], 0, selector + panel % 2 * 2)), 0};
    } else {
      const u32 twice = __byte_perm(words[panel], 0, selector);
      if constexpr (MXK_SCALES == FP16) return make_ready(Scale{twice & 0xFFFF, 0});
      return {twice, 0};
    }
  }
};

using Words = u32[UNITS][2][2];  // of a panel of a lane's rows

__device__ __forceinline__ void load_words(Words& words, const Lane& lane, u32 at) {
#pragma unroll
  for (int unit = 0; unit < UNITS; ++unit) {
#pragma unroll
    for (int half = 0; half < 2; ++half) lane.load(words[unit][half], at + (2 * unit + half) * 32 * SPAN_BYTES);
  }
}

// PANEL_OF_STAGE: 0 to SPAN - 1. Slots of units and halves are 32 rows apart.
template <int PANEL_OF_STAGE, typename Operand>
__device__ __forceinline__ void multiply_panel(Products& products, Sums& sum, Fragment (&fragment)[2], const Scales& scales,
                                               const StagedScales& staged, Words (&loaded)[2], Operand operand, u32 at,
                                               const Lane& lane, u32 used, bool leader, const Constants& constants) {
  // With few rows there are registers for the next panel's words, asked for before this one's are unpacked.
  constexpr bool EARLY = UNITS == 1;
  if constexpr (!EARLY && PANEL_OF_STAGE > 0) load_words(loaded[PANEL_OF_STAGE % 2], lane, at ^ (PANEL_OF_STAGE * PACKED_BYTES));
  const Words& words = loaded[PANEL_OF_STAGE % 2];
  if constexpr (EARLY && PANEL_OF_STAGE + 1 < SPAN)
    load_words(loaded[(PANEL_OF_STAGE + 1) % 2], lane, at ^ ((PANEL_OF_STAGE + 1) * PACKED_BYTES));
  Scale ready[SCALE_PARTS][UNITS][2];
#pragma unroll
  for (int part = 0; part < SCALE_PARTS; ++part) {
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Scale& scale = ready[part][unit][half];
        if constexpr (STAGED) scale = staged.ready(unit, half, PANEL_OF_STAGE, lane.selector(part));
        else scale = make_ready(scales.of[part][unit][half]);
      }
    }
  }
#pragma unroll
  for (int first = 0; first < 4; first += GROUP_STEPS) {
    products.wait(PANEL_OF_STAGE == 0 && first == GROUP_STEPS && leader, used);
    Fragment& group = fragment[first / GROUP_STEPS & 1];
#pragma unroll
    for (int i = 0; i < GROUP_STEPS; ++i) {
      const int step = first + i;
#pragma unroll
      for (int unit = 0; unit < UNITS; ++unit) {
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
    products.run(sum, group, operand + PANEL_OF_STAGE * TOKEN_BYTES / Products::OPERAND_BYTES, first, leader);
  }
}

__device__ __forceinline__ void multiply(Products& products, Sums& sum, const Gemm& p, const ScaleRows& rows, int quarter,
                                         Ring ring, int slot, bool leader) {
  const Constants constants;
  const Lane lane(slot, quarter);
  Fragment fragment[2];
  Scales scales[2];
  StagedScales staged;
  rows.load(scales[0], 0, quarter);
  rows.load(scales[1], 1, quarter);
  products.begin(sum);
  u32 used = ~0u;  // empty-barrier of the stage before
  // A stage: all its panels, or, the last one, `count` of them.
  const auto multiply_stage = [&](int panel, int count) {
    const u32 stage = ring.here(), at = stage + lane.weights;
    barrier_wait(ring.filled(), ring.parity);
    if constexpr (MXK_ROWS == LISTED) copies_to_products_fence();
    const auto operand = Products::operand(stage);
    Words loaded[2];
    load_words(loaded[0], lane, at);
    staged.load(stage + lane.scales);
    multiply_panel<0>(products, sum, fragment, scales[0], staged, loaded, operand, at, lane, used, leader, constants);
    rows.load(scales[0], panel + 2, quarter);
    if (count > 1) {
      multiply_panel<1>(products, sum, fragment, scales[1], staged, loaded, operand, at, lane, used, leader, constants);
      rows.load(scales[1], panel + 3, quarter);
      if constexpr (SPAN == 4) {
        if (count > 2) {
          multiply_panel<2>(products, sum, fragment, scales[0], staged, loaded, operand, at, lane, used, leader, constants);
          rows.load(scales[0], panel + 4, quarter);
          if (count > 3) {
            multiply_panel<3>(products, sum, fragment, scales[1], staged, loaded, operand, at, lane, used, leader, constants);
            rows.load(scales[1], panel + 5, quarter);
          }
        }
      }
    }
    used = ring.emptied();
    products.leave(used, leader);
    ring.next();
  };
  int panel = 0;
#pragma unroll 1
  for (; panel + SPAN <= p.panels; panel += SPAN) multiply_stage(panel, SPAN);
  if (panel < p.panels) {
    products.drain(used, leader);
    used = ~0u;
    multiply_stage(panel, p.panels - panel);
  }
  products.finish(sum, used, leader);
}
