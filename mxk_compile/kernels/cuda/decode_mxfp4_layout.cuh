// The decode kernel's division of columns and of shared memory with MXFP4 weights.
#pragma once
#include "decode.cuh"

constexpr int SHARES = MXK_GROUPS;  // of a slot's columns, a warpgroup each

// Groups of 32 columns whose products are in flight together. What divides the groups spares the mask.
__host__ __device__ constexpr int batch_of(int groups) {
  constexpr int most = NT > 1 ? 4 : 6;
  if (groups <= most) return groups;
  for (int batch = most; batch >= 4; --batch)
    if (groups % batch == 0 && groups / batch % SHARES == 0) return batch;
  for (int batch = most; batch >= 4; --batch)
    if (groups % batch == 0) return batch;
  return 4;
}

template <int COLUMNS>
struct Columns {
  static constexpr int GROUPS = COLUMNS / 32;
  static constexpr int BATCH = batch_of(GROUPS), BATCHES = (GROUPS + BATCH - 1) / BATCH;
  // A slot holds a chunk of a tile's columns, about 512 bytes a row.
  static constexpr int CHUNKS = (GROUPS + MXK_CHUNK - 1) / MXK_CHUNK;
  static constexpr int CHUNK_BATCHES = (BATCHES + CHUNKS - 1) / CHUNKS, CHUNK_GROUPS = CHUNK_BATCHES * BATCH;
  static constexpr int ROW_SCALES = GROUPS, SCALE_ROW = GROUPS;  // bytes
  static constexpr bool PADDED = GROUPS % 16 == 0;
  static constexpr int SCALE_STRIDE = PADDED ? SCALE_ROW + 16 : SCALE_ROW;
  static constexpr int DIGITS = BATCHES * BATCH * 256 * NT;  // of a column block
};
using GateUp = Projection<Columns<K>, true, I>;
using Down = Projection<Columns<I>, false, K>;

constexpr int SLOT = greater(GateUp::SLOT, Down::SLOT);
constexpr int SCALES = greater(GateUp::SCALES, Down::SCALES);
constexpr int DIGITS = greater(GateUp::DIGITS, Down::DIGITS);
constexpr int SUM = NT * 256, SUM_SET = SHARES * TILE_UNITS * SUM, SUM_STAGES = 2;  // partial sums: of a unit; of a tile
constexpr int LIST_BYTES = 6 * 2 * MAX_ROUTES, ROUTER_BYTES = 4 * MAX_ROUTES, COUNT_BYTES = 0;
constexpr int LISTS = round_up(4 * E, 16) * 2 + LIST_BYTES + ROUTER_BYTES + 16;
constexpr int BARRIERS = 256;
constexpr int OTHERS = SUM_STAGES * SUM_SET + LISTS + BARRIERS + 2 * ROWS * 12 + 128;
constexpr int SCALE_STAGES = OTHERS + 3 * SCALES + DIGITS + 2 * SLOT <= SHARED_LIMIT ? 3 : 2;
constexpr int REST = OTHERS + SCALE_STAGES * SCALES;
constexpr int BUFFERS = MXK_BUFFERS ? MXK_BUFFERS : REST + 2 * DIGITS + 3 * SLOT <= SHARED_LIMIT ? 2 : 1;
constexpr int FACTOR_BUFFERS = BUFFERS;  // of digits
constexpr bool AHEAD = BUFFERS > 1;      // DIGIT_WARPS make an expert's digits while the one before is multiplied
constexpr int LAID_BYTES = 0;            // INT4's
constexpr int STAGES = MXK_STAGES ? MXK_STAGES : lesser(3, (SHARED_LIMIT - REST - BUFFERS * DIGITS) / SLOT);
