// The decode kernel's division of columns and of shared memory with INT4 weights.
#pragma once
#include "decode.cuh"

constexpr int SHARES = CONSUMERS;  // of a slot's columns, a warp each
constexpr int CHUNK = lesser(MXK_CHUNK, 126);  // a box has up to 256 elements a row, of 8 bytes at most

template <int COLUMNS>
struct Columns {
  static constexpr int GROUPS = COLUMNS / 32;
  // A slot holds a chunk of a tile's columns, about CHUNK * 16 bytes a row; a warp has STEPS groups of every chunk.
  static constexpr int CHUNKS = (GROUPS + CHUNK - 1) / CHUNK;
  static constexpr int STEPS = (GROUPS + CHUNKS * SHARES - 1) / (CHUNKS * SHARES), CHUNK_GROUPS = STEPS * SHARES;
  static constexpr bool RAGGED = CHUNKS * CHUNK_GROUPS != GROUPS;
  static constexpr int ROW_SCALES = GROUP_LOG == 31 ? 1 : COLUMNS >> GROUP_LOG;
  static constexpr int SCALE_ROW = ROW_SCALES * SCALE_BYTES;
  static constexpr bool WHOLE_GROUPS = COLUMNS % (1 << GROUP_LOG % 31) == 0;
  static constexpr bool PADDED = WHOLE_GROUPS && SCALE_ROW % 16 == 0 && SCALE_ROW + 16 <= MOST_BOX;
  static constexpr int SCALE_STRIDE = PADDED ? (SCALE_ROW / 16 | 1) * 16 : SCALE_ROW;
  static constexpr int DIGITS = round_up(CHUNKS * CHUNK_GROUPS * 16 * NT, 128);  // of a column block: sums of its groups
  static constexpr int LAID = CHUNKS * CHUNK_GROUPS * MXK_LAID * 512;            // of it, activations
};
// Of the down projection only where there are no others: a projection by itself.
using GateUp = Projection<Columns<PROJECT ? 32 : K>, true, PROJECT ? 8 : I>;
using Down = Projection<Columns<I>, false, K>;

constexpr int SLOT = greater(GateUp::SLOT, Down::SLOT);
constexpr int SCALES = greater(GateUp::SCALES, Down::SCALES);
constexpr int DIGITS = greater(GateUp::DIGITS, Down::DIGITS);
constexpr int SUM = NT * 256, SUM_SET = SHARES * TILE_UNITS * SUM;  // partial sums: of a unit; of a tile
// Of column blocks expert, first row and rows; then of routes.
constexpr int LIST_BYTES = (PROJECT == MASKED ? 3 : 6) * 2 * MAX_ROUTES, ROUTER_BYTES = PROJECT ? 0 : 4 * MAX_ROUTES;
// Of each 32 routes a byte an expert, while they are sorted, if that is not much.
constexpr int COUNTED = PROJECT == MASKED ? 0 : round_up(MAX_ROUTES, 32) / 32 * E, COUNT_BYTES = COUNTED <= 4096 ? round_up(COUNTED, 16) : 0;
constexpr int LISTS = round_up(4 * E, 16) * 2 + LIST_BYTES + ROUTER_BYTES + COUNT_BYTES + 16;
constexpr int BARRIERS = 256;
// A ring of `stages` slots wants scales of the tile that is read and of those that the other slots belong to.
constexpr int CHUNKS = PROJECT ? Down::CHUNKS : lesser(GateUp::CHUNKS, Down::CHUNKS);
__host__ __device__ constexpr int scale_stages(int stages) { return 1 + (stages - 1 + CHUNKS - 1) / CHUNKS; }
__host__ __device__ constexpr int ring_bytes(int stages) { return stages * SLOT + scale_stages(stages) * SCALES; }
constexpr int LAID_BYTES = greater(GateUp::LAID, Down::LAID);
constexpr int FIXED = LISTS + BARRIERS + DIGITS + LAID_BYTES + 128;
constexpr int MOST_RING = 120 * 1024;  // more on its way only makes everybody wait longer, first of all for activations
constexpr int FEWEST_STAGES = 3;  // a slot that is read, and two on their way
constexpr int SUM_STAGES = 2 * SUM_SET + FIXED + ring_bytes(FEWEST_STAGES) > SHARED_LIMIT ? 1 : 2;
__host__ __device__ constexpr int most_stages() {
  int stages = 6;
  while (stages > FEWEST_STAGES && stages * SLOT > MOST_RING) --stages;
  while (stages > 2 && SUM_STAGES * SUM_SET + FIXED + ring_bytes(stages) > SHARED_LIMIT) --stages;
  return stages;
}
constexpr int STAGES = MXK_STAGES ? MXK_STAGES : most_stages();
constexpr int SCALE_STAGES = scale_stages(STAGES), BUFFERS = 1, FACTOR_BUFFERS = 0;
