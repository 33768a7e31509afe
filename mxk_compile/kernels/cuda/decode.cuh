// The decode kernel's parameters: macros of the module, argument of the launch, and what follows from them (moe_decode.cu).
//
// With MXK_PROJECT the module holds one projection of `mxk::project`, K outputs of I columns, and no layer.
#pragma once
#include "formats.cuh"

#ifndef MXK_HIDDEN
#define MXK_HIDDEN 2880
#endif
#ifndef MXK_INTER
#define MXK_INTER 2880
#endif
#ifndef MXK_EXPERTS
#define MXK_EXPERTS 128
#endif
#ifndef MXK_TOP_K
#define MXK_TOP_K 4
#endif
#ifndef MXK_MAX_ROUTES
#define MXK_MAX_ROUTES 256  // multiple of 8; of a projection's masked rows, column blocks
#endif
#ifndef MXK_GROUPS
#define MXK_GROUPS 3  // warpgroups that split the columns of a slot
#endif
#ifndef MXK_COLUMN_TILES
#define MXK_COLUMN_TILES 1  // rows of an expert taken at once, in fours
#endif
#ifndef MXK_CHUNK
#define MXK_CHUNK (MXK_FORMAT ? 56 : 32)  // groups of 32 columns in a slot, about; a box of 63 is the widest
#endif
#ifndef MXK_UNITS
#define MXK_UNITS 1  // INT4: units of 16 rows in a slot
#endif
#ifndef MXK_SLICES
#define MXK_SLICES 1  // INT4: blocks that share the columns of a projection, of gate/up in a layer
#endif
#ifndef MXK_PROJECT
#define MXK_PROJECT 0  // Rows + 1 where the module is a projection
#endif
#ifndef MXK_STAGES
#define MXK_STAGES 0  // slots of the ring; 0: as many as fit, up to 3 (INT4, whose are smaller: 6): more in flight is slower
#endif
#ifndef MXK_BUFFERS
#define MXK_BUFFERS 0  // of an expert's activations; 0: two where they fit beside a ring of 3
#endif
#ifndef MXK_INTERLEAVED
#define MXK_INTERLEAVED 1  // row 2i is gate i, row 2i + 1 up i; otherwise gate_row + i and up_row + i
#endif
#ifndef MXK_SCALES_SMALL
#define MXK_SCALES_SMALL 0  // 1: no scale byte of w13 and w2 is above 128, which was checked once a weight
#endif
#ifndef MXK_PER_ROUTE
#define MXK_PER_ROUTE 0
#endif
#ifndef MXK_ALIGNED
#define MXK_ALIGNED 1
#endif
#ifndef MXK_X_ALIGNED
#define MXK_X_ALIGNED 1
#endif

struct alignas(64) TensorMap {
  u8 bytes[128];  // CUtensorMap
};

struct Decode {
  // Weights and, where PADDED, their scales: [E, rows, row bytes as 32-bit words], boxes of 16 rows, 8 where gate and up
  // rows lie apart. With lists of weights a map an expert instead, at `maps`: w13, s13, w2, s2 of each.
  TensorMap w13_map, s13_map, w2_map, s2_map;
  const u8* maps;
  const i32* expert_of_block;  // of sorted rows: expert_ids, num_tokens_post_padded
  const i32* places_used;
  const u8* x;  // bf16 [T, K], dense rows
  const u8* ids;  // or sorted_token_ids, masked_m
  const u8* router;
  u8* out;  // bf16; of a layer contiguous
  u8* h;
  u8* y;
  u8* parts;      // partial sums on their way between slices, PARTS_BYTES
  u32* counters;  // from x, or two before it, to here addresses, which differ from call to call
  Operand w13, s13, b13;  // with row_step 1 and separate stacks: up rows are expert + up_expert
  Operand w2, s2, b2;
  Operand z13, z2;  // zero points
  // Elements. Of a projection's row r: row r / x_rows * x_stride + r % x_rows * x_inner of x.
  i64 x_stride, x_inner, out_stride;
  i64 ids_stride[2], router_stride[2];      // elements
  i64 experts_min;
  i32 tokens;
  i32 ids_bytes, ids_signed;                // 1, 2, 4 or 8
  i32 router_dtype, b13_dtype, b2_dtype;    // Dtype
  i32 activation;                           // Activation
  i32 gate_row, up_row, up_expert;          // not interleaved
  i32 x_rows, rows, places, block_size, blocks;  // of a projection: as in groups.cu
  float alpha, limit;
};

constexpr int K = MXK_HIDDEN, I = MXK_INTER, E = MXK_EXPERTS, TOP_K = MXK_TOP_K, MAX_ROUTES = MXK_MAX_ROUTES;
constexpr bool IS_INT4 = !IS_MXFP4;
constexpr int CONSUMERS = 4 * MXK_GROUPS;                    // warps
constexpr int SHARES = IS_INT4 ? CONSUMERS : MXK_GROUPS;     // of a slot's columns: a warp each, or a warpgroup
constexpr int NT = MXK_COLUMN_TILES, ROWS = 4 * NT;
// MXFP4: warp 0 copies, 1..3 make digits, 4..7 are the epilogue. INT4: 1..3 are the epilogue.
constexpr int DIGIT_WARPS = IS_INT4 ? 0 : 3, EPILOGUE = IS_INT4 ? 3 : 4;
constexpr int HELPERS = 1 + DIGIT_WARPS + EPILOGUE;
constexpr int THREADS = (CONSUMERS + HELPERS) * 32;
// Register counts are set by warpgroup and must fit what the launch gives: asking for more would wait for ever.
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;
constexpr int HELPER_REGISTERS = IS_INT4 ? 88 : 72;
constexpr int CONSUMER_REGISTERS = (LAUNCH_REGISTERS * THREADS - HELPERS * 32 * HELPER_REGISTERS) / (CONSUMERS * 32) / 8 * 8;
constexpr int COUNTERS_AT = 64;  // of 32 bits: before them the grid-wide barrier, then one a unit of output rows
constexpr int COUNTER_BYTES = 4096;
constexpr int SHARED_LIMIT = 232448;  // of a block
enum ProjectKind { LAYER, ROUTES, SORTED, MASKED };
constexpr ProjectKind PROJECT = static_cast<ProjectKind>(MXK_PROJECT);
// After them the slices': of each team of blocks that share rows and each warp of the epilogue, how many parts each of
// the others has brought and how many were taken.
constexpr int FLAGS_AT = COUNTERS_AT + (PROJECT ? 0 : K / 16), MOST_BLOCKS = 148;
static_assert(K % (PROJECT ? 16 : 32) == 0 && I % 32 == 0 && MAX_ROUTES % 8 == 0, "limits");
static_assert(FLAGS_AT + (MXK_SLICES > 1 ? MOST_BLOCKS * EPILOGUE : 0) <= COUNTER_BYTES / 4, "counters");

__host__ __device__ constexpr int round_up(int value, int step) { return (value + step - 1) / step * step; }
__host__ __device__ constexpr int lesser(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int greater(int a, int b) { return a > b ? a : b; }

constexpr int CHUNK = MXK_CHUNK;
constexpr int MOST_BOX = 1024;  // bytes of a row of a box

// Work comes in units of 16 weight rows, a warp's part of a product; a tile is up to 4 of them, a warpgroup's.
constexpr int UNIT = 16, TILE_UNITS = IS_INT4 ? MXK_UNITS : 4, TILE_ROWS = UNIT * TILE_UNITS;

// Groups of 32 columns whose products are in flight together. What divides the groups spares the mask.
__host__ __device__ constexpr int batch_of(int groups) {
  if (IS_INT4) return lesser(groups, 4);  // whose scales are one load
  constexpr int most = NT > 1 ? 4 : 6;
  if (groups <= most) return groups;
  for (int batch = most; batch >= 4; --batch)
    if (groups % batch == 0 && groups / batch % SHARES == 0) return batch;
  for (int batch = most; batch >= 4; --batch)
    if (groups % batch == 0) return batch;
  return 4;
}

// One projection: COLUMNS of the dot product, of SLICES such parts; units of (gate, up) rows where PAIRS.
template <int COLUMNS, bool PAIRS_, int OUTPUTS, int SLICES_ = 1>
struct Projection {
  static constexpr bool PAIRS = PAIRS_;
  static constexpr int SLICES = SLICES_;
  static constexpr int UNIT_OUTPUTS = PAIRS ? 8 : 16, UNITS = OUTPUTS / UNIT_OUTPUTS;  // of an expert
  static constexpr int BYTES = COLUMNS / 2, GROUPS = COLUMNS / 32;
  static constexpr int BATCH = batch_of(GROUPS), BATCHES = (GROUPS + BATCH - 1) / BATCH;
  // A slot holds a chunk of a tile's columns, about CHUNK * 16 bytes a row.
  static constexpr int CHUNKS = (GROUPS + CHUNK - 1) / CHUNK;
  static constexpr int CHUNK_BATCHES = (BATCHES + CHUNKS - 1) / CHUNKS, CHUNK_GROUPS = CHUNK_BATCHES * BATCH;
  // An odd multiple of 16: eight rows' words of four lanes lie in different banks.
  static constexpr int STRIDE = CHUNK_GROUPS * 16 + (CHUNK_GROUPS % 2 ? 0 : 16);
  static_assert(STRIDE <= MOST_BOX, "a slot's rows");
  static constexpr int SLOT = TILE_ROWS * STRIDE;
  // Scales of a tile: copied as they lie in memory, whole rows, to a place that starts up to 15 bytes early. Row by row, and
  // padded, where they would lie in the same banks; then those of this slice. Zero points: whole always.
  static constexpr bool SEPARATE = PAIRS && !MXK_INTERLEAVED, PAIRED = PAIRS && MXK_INTERLEAVED;
  static constexpr int ROW_SCALES = GROUP_LOG == 31 ? 1 : COLUMNS * SLICES >> GROUP_LOG;
  static constexpr int PADDED_ROW = GROUP_LOG == 31 || COLUMNS % (1 << GROUP_LOG % 31) ? 1 : (COLUMNS >> GROUP_LOG) * SCALE_BYTES;
  static constexpr bool PADDED = PADDED_ROW % 16 == 0 && PADDED_ROW + 16 <= MOST_BOX;
  static constexpr int SCALE_ROW = PADDED ? PADDED_ROW : ROW_SCALES * SCALE_BYTES;
  static constexpr int SCALE_STRIDE = !PADDED ? SCALE_ROW : IS_MXFP4 ? SCALE_ROW + 16 : (SCALE_ROW / 16 | 1) * 16;
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
  // Of a column block: two digits, or bf16 and a sum of each group, a value.
  static constexpr int DIGITS = round_up(BATCHES * BATCH * (IS_INT4 ? 272 : 256) * NT, 128);
};
// Of the down projection only where there are no others: a projection by itself.
using GateUp = Projection<PROJECT ? 32 : K / MXK_SLICES, true, PROJECT ? 8 : I, PROJECT ? 1 : MXK_SLICES>;
using Down = Projection<PROJECT ? I / MXK_SLICES : I, false, K, PROJECT ? MXK_SLICES : 1>;
static_assert(MXK_SLICES == 1 || (IS_INT4 && (PROJECT ? I : K) % (32 * MXK_SLICES) == 0), "slices");

constexpr int SLOT = greater(GateUp::SLOT, Down::SLOT);
constexpr int SCALES = greater(GateUp::SCALES, Down::SCALES);
constexpr int DIGITS = greater(GateUp::DIGITS, Down::DIGITS);
constexpr int SUM = NT * 256, SUM_SET = SHARES * TILE_UNITS * SUM;  // partial sums: of a unit; of a tile
// Of column blocks expert, first row and rows; then of routes.
constexpr int LIST_BYTES = (PROJECT == MASKED ? 3 : 6) * 2 * MAX_ROUTES, ROUTER_BYTES = PROJECT ? 0 : 4 * MAX_ROUTES;
constexpr int LISTS = round_up(4 * E, 16) * 2 + LIST_BYTES + ROUTER_BYTES + 16;
constexpr int BARRIERS = 256;
constexpr int SUM_STAGES =
    IS_INT4 && 2 * SUM_SET + LISTS + BARRIERS + 2 * ROWS * 12 + 128 + 2 * SCALES + DIGITS + 3 * SLOT > SHARED_LIMIT ? 1 : 2;
constexpr int OTHERS = SUM_STAGES * SUM_SET + LISTS + BARRIERS + 2 * ROWS * 12 + 128;
constexpr int SCALE_STAGES = OTHERS + 3 * SCALES + DIGITS + 2 * SLOT <= SHARED_LIMIT ? 3 : 2;
constexpr int REST = OTHERS + SCALE_STAGES * SCALES;
constexpr int BUFFERS = IS_INT4 ? 1 : MXK_BUFFERS ? MXK_BUFFERS : REST + 2 * DIGITS + 3 * SLOT <= SHARED_LIMIT ? 2 : 1;
constexpr int STAGES = MXK_STAGES ? MXK_STAGES : lesser(IS_INT4 ? 6 : 3, (SHARED_LIMIT - REST - BUFFERS * DIGITS) / SLOT);
constexpr int AT_DIGITS = STAGES * SLOT;
constexpr int AT_SCALES = AT_DIGITS + BUFFERS * DIGITS;
constexpr int AT_SUMS = AT_SCALES + SCALE_STAGES * SCALES;
constexpr int AT_BARRIERS = AT_SUMS + SUM_STAGES * SUM_SET;
constexpr int AT_FACTORS = AT_BARRIERS + BARRIERS;        // [BUFFERS][ROWS][2] fp32
constexpr int AT_LARGEST = AT_FACTORS + BUFFERS * ROWS * 8;  // [BUFFERS][ROWS]
constexpr int AT_COUNTS = AT_LARGEST + BUFFERS * ROWS * 4;
constexpr int AT_OFFSETS = AT_COUNTS + round_up(4 * E, 16);
constexpr int AT_LISTS = AT_OFFSETS + round_up(4 * E, 16);
constexpr int AT_ROUTER = AT_LISTS + LIST_BYTES;  // fp32
constexpr int AT_END = AT_ROUTER + ROUTER_BYTES;
constexpr int SHARED = round_up(AT_END + 16, 128);
// Parts in flight between slices, of a warp of the epilogue, before it waits for them to be taken.
constexpr int PARTS_IN_FLIGHT = 16, PARTS_BYTES = MXK_SLICES > 1 ? MOST_BLOCKS * EPILOGUE * PARTS_IN_FLIGHT * SUM : 0;
static_assert(STAGES >= 2 && SHARED <= SHARED_LIMIT, "shared memory of a block");

// The barriers of a block: full and empty of each ring.
constexpr int AT_SLOT_FULL = 0, AT_SLOT_EMPTY = AT_SLOT_FULL + 8 * STAGES, AT_SCALES_EMPTY = AT_SLOT_EMPTY + 8 * STAGES;
constexpr int AT_DIGITS_FULL = AT_SCALES_EMPTY + 8 * SCALE_STAGES, AT_DIGITS_EMPTY = AT_DIGITS_FULL + 8 * BUFFERS;
constexpr int AT_SUMS_FULL = AT_DIGITS_EMPTY + 8 * BUFFERS, AT_SUMS_EMPTY = AT_SUMS_FULL + 8 * SUM_STAGES;
static_assert(AT_SUMS_EMPTY + 8 * SUM_STAGES <= BARRIERS, "barriers");

extern "C" {
__device__ __constant__ extern const int decode_threads = THREADS;
__device__ __constant__ extern const int decode_shared = SHARED;
__device__ __constant__ extern const int decode_parts = PARTS_BYTES;
// Bytes of a row of a box of w13 and w2, and of their scales (0: no maps).
__device__ __constant__ extern const int decode_box13 = GateUp::STRIDE, decode_box2 = Down::STRIDE;
__device__ __constant__ extern const int decode_scales13 = GateUp::PADDED ? GateUp::SCALE_STRIDE : 0;
__device__ __constant__ extern const int decode_scales2 = Down::PADDED ? Down::SCALE_STRIDE : 0;
}
