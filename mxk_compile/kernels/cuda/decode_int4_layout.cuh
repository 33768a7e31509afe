// The decode kernel's parameters with INT4 weights: who does what in a block, and where it lies in shared memory.
#pragma once
#include "decode.cuh"

constexpr int CONSUMERS = 4 * MXK_GROUPS;  // warps
constexpr int SHARES = CONSUMERS;          // of a slot's columns
constexpr int DIGIT_WARPS = 0, EPILOGUE = 3;  // warp 0 copies, 1..3 are the epilogue
constexpr int HELPERS = 1 + DIGIT_WARPS + EPILOGUE;
constexpr int THREADS = (CONSUMERS + HELPERS) * 32;
// Register counts are set by warpgroup and must fit what the launch gives: asking for more would wait for ever.
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;
constexpr int HELPER_REGISTERS = 88;
constexpr int CONSUMER_REGISTERS = (LAUNCH_REGISTERS * THREADS - HELPERS * 32 * HELPER_REGISTERS) / (CONSUMERS * 32) / 8 * 8;
constexpr int CHUNK = lesser(MXK_CHUNK, 126);  // a box has up to 256 elements a row, of 8 bytes at most
constexpr int MOST_BOX = 1024;  // bytes of a row of a box of 32-bit elements

// Work comes in units of 16 weight rows, a warp's part of a product; a tile is up to 4 of them, a warpgroup's.
constexpr int UNIT = 16, TILE_UNITS = MXK_UNITS, TILE_ROWS = UNIT * TILE_UNITS;

// One projection: COLUMNS of the dot product; units of (gate, up) rows where PAIRS.
template <int COLUMNS, bool PAIRS_, int OUTPUTS>
struct Projection {
  static constexpr bool PAIRS = PAIRS_;
  static constexpr int UNIT_OUTPUTS = PAIRS ? 8 : 16, UNITS = OUTPUTS / UNIT_OUTPUTS;  // of an expert
  static constexpr int BYTES = COLUMNS / 2, GROUPS = COLUMNS / 32;
  // A slot holds a chunk of a tile's columns, about CHUNK * 16 bytes a row; a warp has STEPS groups of every chunk.
  static constexpr int CHUNKS = (GROUPS + CHUNK - 1) / CHUNK;
  static constexpr int STEPS = (GROUPS + CHUNKS * SHARES - 1) / (CHUNKS * SHARES), CHUNK_GROUPS = STEPS * SHARES;
  static constexpr bool RAGGED = CHUNKS * CHUNK_GROUPS != GROUPS;
  // An odd multiple of 16: eight rows' words of four lanes lie in different banks.
  static constexpr int STRIDE = CHUNK_GROUPS * 16 + (CHUNK_GROUPS % 2 ? 0 : 16);
  static constexpr int WORD = STRIDE > MOST_BOX ? 8 : 4;  // bytes of a box's elements
  static_assert(STRIDE <= 2 * MOST_BOX, "a row of a box");
  static constexpr int SLOT = TILE_ROWS * STRIDE;
  // Scales of a tile: copied as they lie in memory, whole rows, to a place that starts up to 15 bytes early. Row by row, and
  // padded, where they would lie in the same banks. Zero points: whole always.
  static constexpr bool SEPARATE = PAIRS && !MXK_INTERLEAVED, PAIRED = PAIRS && MXK_INTERLEAVED;
  static constexpr int ROW_SCALES = GROUP_LOG == 31 ? 1 : COLUMNS >> GROUP_LOG;
  static constexpr int PADDED_ROW = GROUP_LOG == 31 || COLUMNS % (1 << GROUP_LOG % 31) ? 1 : (COLUMNS >> GROUP_LOG) * SCALE_BYTES;
  static constexpr bool PADDED = PADDED_ROW % 16 == 0 && PADDED_ROW + 16 <= MOST_BOX;
  static constexpr int SCALE_ROW = PADDED ? PADDED_ROW : ROW_SCALES * SCALE_BYTES;
  static constexpr int SCALE_STRIDE = !PADDED ? SCALE_ROW : (SCALE_ROW / 16 | 1) * 16;
  static constexpr int HALF_SCALES = round_up(TILE_ROWS / 2 * SCALE_ROW + 15, 16);
  static constexpr int ZEROS = round_up(PADDED ? TILE_ROWS * SCALE_STRIDE : 2 * HALF_SCALES, 16);  // where they are
  static constexpr int HALF_ZEROS = round_up(TILE_ROWS / 2 * ROW_SCALES + 15, 16);
  static constexpr int SCALES = round_up(ZEROS + (MXK_ZEROS ? 2 * HALF_ZEROS : 0), 128);
  // Fragment row g + 8 * half of a unit, as a row of its slot. Where gate and up rows alternate, they come in the order of
  // memory; upper lanes swap their two, so that eight rows at a time lie in different banks.
  __device__ static constexpr int slot_row(int g, int half) { return PAIRED ? 2 * g + (half ^ g >> 2) : g + 8 * half; }
  __device__ static u32 scale_at(int unit, int g, int half) {
    if (PADDED) return (UNIT * unit + slot_row(g, half)) * SCALE_STRIDE;
    if (SEPARATE) return half * HALF_SCALES + (8 * unit + g) * SCALE_ROW;
    return (UNIT * unit + slot_row(g, half)) * SCALE_ROW;
  }
  __device__ static u32 zero_at(int unit, int g, int half) {
    return SEPARATE ? half * HALF_ZEROS + (8 * unit + g) * ROW_SCALES : (UNIT * unit + slot_row(g, half)) * ROW_SCALES;
  }
  // Distance of a tile's scales from the 16-byte boundary that their copy starts on.
  __device__ static u32 skew(int first_unit) {
    return MXK_ALIGNED && !PADDED ? (static_cast<u32>(first_unit) * (SEPARATE ? 8 : UNIT) * SCALE_ROW) & 15 : 0;
  }
  __device__ static u32 zero_skew(int first_unit) { return (static_cast<u32>(first_unit) * (SEPARATE ? 8 : UNIT) * ROW_SCALES) & 15; }
  // Of a column block: sums of the activations in a group.
  static constexpr int DIGITS = round_up(CHUNKS * CHUNK_GROUPS * 16 * NT, 128);
};
// Of the down projection only where there are no others: a projection by itself.
using GateUp = Projection<PROJECT ? 32 : K, true, PROJECT ? 8 : I>;
using Down = Projection<I, false, K>;

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
constexpr int FIXED = LISTS + BARRIERS + DIGITS + 128;
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
constexpr int SCALE_STAGES = scale_stages(STAGES), BUFFERS = 1;
constexpr int AT_DIGITS = STAGES * SLOT;
constexpr int AT_SCALES = AT_DIGITS + BUFFERS * DIGITS;
constexpr int AT_SUMS = AT_SCALES + SCALE_STAGES * SCALES;
constexpr int AT_BARRIERS = AT_SUMS + SUM_STAGES * SUM_SET;
constexpr int AT_COUNTS = AT_BARRIERS + BARRIERS;
constexpr int AT_OFFSETS = AT_COUNTS + round_up(4 * E, 16);
constexpr int AT_LISTS = AT_OFFSETS + round_up(4 * E, 16);
constexpr int AT_ROUTER = AT_LISTS + LIST_BYTES;  // fp32
constexpr int AT_COUNTS_OF = AT_ROUTER + ROUTER_BYTES;
constexpr int AT_END = AT_COUNTS_OF + COUNT_BYTES;
