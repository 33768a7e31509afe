// prefill.cu's producers: activations, packed weights and scales of a tile into the ring.
#pragma once
#include "prefill.cuh"

// Activations of a tile in panels, or in place, by one thread.
__device__ __forceinline__ void feed_tokens(const Gemm& p, const int4& tile, Ring ring) {
  const u8* from = p.rows + static_cast<i64>(tile.y) * PANEL_BYTES;
  const i64 step = static_cast<i64>(p.total_rows) * PANEL_BYTES;
  for (int panel = 0; panel < p.panels; panel += SPAN) {
    const int count = min(SPAN, p.panels - panel);
    barrier_wait(ring.emptied(), ring.parity);
    barrier_arrive_expect(ring.filled(), count * TOKEN_BYTES);
    for (int i = 0; i < count; ++i, from += step) {
      const u32 target = ring.here() + i * TOKEN_BYTES;
#if MXK_ROWS == IN_PLACE
      tensor_copy(target, p.map.bytes, PANEL * (panel + i), tile.y - tile.x * p.expert_places, p.expert_places ? tile.x : 0,
                  ring.filled());
#else
      bulk_copy(target, from, TOKEN_BYTES, ring.filled());
#endif
    }
    ring.next();
  }
}

// What a projection's list says of a tile's places, by TOKEN_WARPS warps, which ask for it a tile ahead.
struct Places {
  static constexpr int STEP = 4 * TOKEN_WARPS, EACH = (TOKENS / TOKEN_WARPS + 31) / 32;
  i32 of[EACH];

  // The lane's `i`th place: a warp takes four of a STEP.
  static __device__ __forceinline__ int place(int i, int warp, int lane) {
    return (8 * i + lane / 4) * STEP + 4 * warp + lane % 4;
  }
  __device__ __forceinline__ void look_up(const Gemm& p, const int4& tile, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = place(i, warp, lane);
      of[i] = at >= tile.w ? -1 : p.listed == ALL ? tile.y + at : p.list[tile.y + at];
    }
  }
  __device__ __forceinline__ void store(const Gemm& p, const int4& tile, List& list, int warp, int lane) const {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = place(i, warp, lane);
      if (at >= TOKENS) continue;
      const bool somebody = of[i] >= 0 && (p.listed == ALL || of[i] < p.most_listed);
      list.target[at] = !somebody ? -1 : p.listed == MARKED ? tile.y + at : of[i];
#if MXK_ROWS == LISTED
      const u32 row = p.share > 1 ? of[i] / p.share : of[i];
      list.source[at] = somebody ? row * p.row_stride : 0;  // nobody's row is any row: its products go nowhere
#endif
    }
  }
};

#if MXK_ROWS == LISTED
// Rows of activations of a tile, by TOKEN_WARPS warps: eight lanes a row, 16 bytes each.
__device__ __forceinline__ void feed_rows(const Gemm& p, const int4& tile, const List& list, int warp, int lane, Ring ring) {
  constexpr int STEP = Places::STEP, AT_ONCE = 4;
  const int chunk = lane % 8, first = 4 * warp + lane / 8;
  const u8* from = p.rows + 16 * chunk;
  int columns = p.columns - 8 * chunk;
  for (int panel = 0; panel < p.panels; panel += SPAN) {
    barrier_wait(ring.emptied(), ring.parity);
    const u32 here = ring.here() + first * PANEL_BYTES;
#pragma unroll
    for (int base = 0; base < TOKENS; base += AT_ONCE * STEP) {
      if (base >= tile.z) break;
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int at = base + STEP * i;
        if (at >= TOKENS) continue;
        const u8* row = from + static_cast<u64>(list.source[at + first]) * 16;
        const u32 target = here + at * PANEL_BYTES + (chunk ^ (at + first) % 8) * 16;
#pragma unroll
        for (int j = 0; j < SPAN; ++j)
          copy_16(target + j * TOKEN_BYTES, row + j * PANEL_BYTES, PANEL * j < columns ? 16 : 0);
      }
    }
    barrier_arrive_after_copies(ring.filled());
    if (lane == 0) barrier_arrive(ring.filled());  // for what the warp has said in `list`
    from += SPAN * PANEL_BYTES;
    columns -= SPAN * PANEL;
    ring.next();
  }
}
#endif

// Packed rows of a tile, by COPIERS threads: 2 * SPAN of them copy what a stage has of a row.
template <Product PRODUCT>
__device__ __forceinline__ void feed_weights(const Gemm& p, const int4& tile, int row_tile, int t, Ring ring) {
  using Rows = Tile<PRODUCT>;
  constexpr int CHUNKS = 2 * SPAN, HALVES = COPIERS / 8 / CHUNKS;  // of a row; halves that are copied at once
  const int chunk = t % CHUNKS, g = t / CHUNKS % 8, half = t / (8 * CHUNKS);
  const int output = Rows::first_output(row_tile, g);
  const i64 stride = p.weight.row_stride * Rows::row_step(p);
  const u8* from[2 / HALVES];
#pragma unroll
  for (int i = 0; i < 2 / HALVES; ++i) {
    const int h = HALVES == 2 ? half : i;
    from[i] = p.weight.expert(Rows::expert(p, tile.x, h)) + Rows::row(p, output, h) * p.weight.row_stride + 16 * chunk;
  }
  const int rest = p.outputs - output;
  const u32 to = WEIGHTS + (32 * half + g) * SPAN_BYTES + ((chunk / 2) ^ turn_of(g)) * PACKED_BYTES + chunk % 2 * 16;
  const bool whole = (row_tile + 1) * Rows::OUTPUTS <= p.outputs;  // else some rows are not there
  const i64 of_warp = Rows::WARP * stride, of_unit = Rows::UNIT * stride, of_group = Rows::GROUP * stride;
  const i64 steps[4] = {0, of_warp, 2 * of_warp, 3 * of_warp};
  int columns = p.columns - 32 * chunk;
  for (int panel = 0; panel < p.panels; panel += SPAN) {
    barrier_wait(ring.emptied(), ring.parity);
    const u32 target = ring.here() + to, valid = columns > 0 ? 16 : 0;
    if (whole) {
      // Addresses in registers of their own: one that a copy still reads waits for the memory pipe.
#pragma unroll
      for (int i = 0; i < 2 / HALVES; ++i) {
        const u8* row = from[i];
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // group and unit
#pragma unroll
          for (int warp = 0; warp < 4; ++warp)
            copy_16(target + (64 * j + 32 * i + 8 * warp) * SPAN_BYTES, row + steps[warp], valid);
          row += j == 1 ? of_group - of_unit : of_unit;
          asm volatile("" : "+l"(row));  // else the compiler keeps all addresses, and spills them
        }
      }
    } else {
#pragma unroll 1
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < 2 / HALVES; ++i) {
          const u8* row = from[i] + j / 2 * of_group + j % 2 * of_unit;
          const int away = Rows::GROUP * (j / 2) + Rows::UNIT * (j % 2);
#pragma unroll
          for (int warp = 0; warp < 4; ++warp)
            copy_16(target + (64 * j + 32 * i + 8 * warp) * SPAN_BYTES, row + steps[warp],
                    away + Rows::WARP * warp < rest ? valid : 0);
        }
      }
    }
    barrier_arrive_after_copies(ring.filled());
#pragma unroll
    for (int i = 0; i < 2 / HALVES; ++i) from[i] += SPAN_BYTES;
    columns -= SPAN * PANEL;
    ring.next();
  }
}

// Scales of a tile, by SCALERS threads: eight rows each.
template <Product PRODUCT>
__device__ __forceinline__ void feed_scales(const Gemm& p, const int4& tile, int row_tile, int t, Ring ring) {
  using Rows = Tile<PRODUCT>;
  const int g = t % 8, warp = t / 8;
  const int output = Rows::first_output(row_tile, g) + Rows::WARP * warp;
  i32 stride = static_cast<i32>(p.scale.row_stride) * Rows::row_step(p);
  const u8* from[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    from[half] = p.scale.expert(Rows::expert(p, tile.x, half)) + Rows::row(p, output, half) * p.scale.row_stride;
  const int rest = p.outputs - output;
  const u32 to = SCALES + (8 * warp + g) * ROW_SCALES;
  int groups = (p.columns + 31) / 32;
  if constexpr (MXK_SCALE_ALIGNMENT >= 4) {
    constexpr int SIZE = MXK_SCALE_ALIGNMENT < ROW_SCALES ? MXK_SCALE_ALIGNMENT : STAGED ? ROW_SCALES : 4;
    for (int panel = 0; panel < p.panels; panel += SPAN) {
      barrier_wait(ring.emptied(), ring.parity);
      const u32 target = ring.here() + to;
#pragma unroll 1
      for (int j = 0; j < 4; ++j) {  // group and unit
        const int away = Rows::GROUP * (j / 2) + Rows::UNIT * (j % 2);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int at = 0; at < ROW_SCALES; at += SIZE) {
            const int left = groups * SCALE_BYTES - at;
            copy_small<SIZE>(target + (64 * j + 32 * half) * ROW_SCALES + at, from[half] + away * stride + at,
                             away < rest ? max(0, min(SIZE, left)) : 0);
          }
        }
      }
      barrier_arrive_after_copies(ring.filled());
      from[0] += ROW_SCALES, from[1] += ROW_SCALES, groups -= 2 * SPAN;
      ring.next();
    }
  } else {
    // Too narrow for copies: through registers, a stage ahead, as words on 4 bytes. A row's first bytes of a stage may lie in
    // the last word that the stage before read.
    constexpr int WORDS = STAGED ? ROW_SCALES / 4 : 1;
    u32 read[4][2][WORDS + 1];
    const auto source = [&](int j, int half) { return from[half] + Rows::distance(j / 2, j % 2, 0) * stride; };
    const bool whole = (row_tile + 1) * Rows::OUTPUTS <= p.outputs;
    const auto load = [&](bool first, bool all) {
      asm volatile("" : "+r"(stride));  // else the compiler keeps all addresses, and spills them
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const u64 at = reinterpret_cast<u64>(source(j, half));
          const u32* words = reinterpret_cast<const u32*>(at & ~static_cast<u64>(3));
          const int left = Rows::distance(j / 2, j % 2, 0) < rest ? groups * SCALE_BYTES + static_cast<int>(at & 3) : 0;
          if (first) read[j][half][0] = left > 0 ? __ldg(words) : 0;
          else read[j][half][0] = read[j][half][WORDS];
#pragma unroll
          for (int i = 1; i <= WORDS; ++i) read[j][half][i] = all || 4 * i < left ? __ldg(words + i) : 0;
        }
      }
    };
    const auto store = [&](u32 target, int left) {  // bytes of a row
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const u32 shift = 8 * static_cast<u32>(reinterpret_cast<u64>(source(j, half)));
#pragma unroll
          for (int i = 0; i < WORDS; ++i) {
            u32 word = __funnelshift_r(read[j][half][i], read[j][half][i + 1], shift);
            if (4 * i + 4 > left) word &= 4 * i < left ? ~0u >> (8 * (4 * i + 4 - left)) : 0;
            store_shared_4(target + (64 * j + 32 * half) * ROW_SCALES + 4 * i, word);
          }
        }
      }
    };
    load(true, false);
    for (int panel = 0; panel < p.panels; panel += SPAN) {
      barrier_wait(ring.emptied(), ring.parity);
      const u32 target = ring.here() + to;
      if (groups >= 2 * SPAN) store(target, ROW_SCALES);
      else store(target, groups * SCALE_BYTES);
      barrier_arrive(ring.filled());
      from[0] += ROW_SCALES, from[1] += ROW_SCALES, groups -= 2 * SPAN;
      if (whole && groups > 2 * SPAN) load(false, true);
      else load(false, false);
      ring.next();
    }
  }
}
