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
#define MXK_CHUNK (MXK_FORMAT ? 126 : 32)  // groups of 32 columns in a slot, about
#endif
#ifndef MXK_UNITS
#define MXK_UNITS 1  // INT4: units of 16 rows in a slot
#endif
#ifndef MXK_LAID
#define MXK_LAID 0  // INT4: of the eights of rows those whose activations lie in shared memory, not in registers
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
constexpr int NT = MXK_COLUMN_TILES, ROWS = 4 * NT;
constexpr int COUNTER_BYTES = 512;
constexpr int SHARED_LIMIT = MXK_SHARED;  // of a block
enum ProjectKind { LAYER, ROUTES, SORTED, MASKED };
constexpr ProjectKind PROJECT = static_cast<ProjectKind>(MXK_PROJECT);
static_assert(K % (PROJECT ? 16 : 32) == 0 && I % 32 == 0 && MAX_ROUTES % 8 == 0, "limits");

__host__ __device__ constexpr int round_up(int value, int step) { return (value + step - 1) / step * step; }
__host__ __device__ constexpr int lesser(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int greater(int a, int b) { return a > b ? a : b; }

// Column blocks are taken in parts: gate/up of all, then down of all. While the rows of H of one part are on their way between
// the multiprocessors, the next part's work goes on. Many are taken at once: a multiprocessor would have more of them, and
// their activations cost what the wait does. So it is with INT4, whose consumers bring the activations.
constexpr int PARTS = MXK_FORMAT ? 1 : 2, MOST_IN_PARTS = 32;

// Warps of a block: 0 copies, DIGIT_WARPS make digits ahead of time (where two experts' do not fit, and of INT4, the consumers
// bring the activations), EPILOGUE finish; the others, the consumers, multiply.
constexpr int DIGIT_WARPS = MXK_FORMAT ? 0 : 3, EPILOGUE = MXK_FORMAT ? 3 : 4, HELPERS = 1 + DIGIT_WARPS + EPILOGUE;
constexpr int CONSUMERS = 4 * MXK_GROUPS;
constexpr int THREADS = (CONSUMERS + HELPERS) * 32;
// Register counts are set by warpgroup and must fit what the launch gives: asking for more would wait for ever.
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;
constexpr int HELPER_REGISTERS = MXK_FORMAT ? 88 : MXK_GROUPS > 2 ? 72 : 96;  // with fewer, MXFP4's epilogue spills
constexpr int CONSUMER_REGISTERS = (LAUNCH_REGISTERS * THREADS - HELPERS * 32 * HELPER_REGISTERS) / (CONSUMERS * 32) / 8 * 8;

// Work comes in units of 16 weight rows, a warp's part of a product; a tile is up to 4 of them, a warpgroup's.
constexpr int UNIT = 16, TILE_UNITS = MXK_FORMAT ? MXK_UNITS : 4, TILE_ROWS = UNIT * TILE_UNITS;
constexpr int MOST_BOX = 1024;  // bytes of a row of a box of 32-bit elements

// One projection, whose columns and scales a format divides (struct Columns): units of (gate, up) rows where PAIRS.
template <class Columns_, bool PAIRS_, int OUTPUTS>
struct Projection : Columns_ {
  using Columns_::CHUNK_GROUPS, Columns_::PADDED, Columns_::ROW_SCALES, Columns_::SCALE_ROW, Columns_::SCALE_STRIDE;
  static constexpr bool PAIRS = PAIRS_;
  static constexpr int UNIT_OUTPUTS = PAIRS ? 8 : 16, UNITS = OUTPUTS / UNIT_OUTPUTS;  // of an expert
  static constexpr int BYTES = Columns_::GROUPS * 16;
  // Of a slot's rows. An odd multiple of 16: eight rows' words of four lanes lie in different banks.
  static constexpr int STRIDE = CHUNK_GROUPS * 16 + (CHUNK_GROUPS % 2 ? 0 : 16);
  static constexpr int WORD = STRIDE > MOST_BOX ? 8 : 4;  // bytes of a box's elements
  static_assert(STRIDE <= 2 * MOST_BOX, "a row of a box");
  static constexpr int SLOT = TILE_ROWS * STRIDE;
  // Scales of a tile: copied as they lie in memory, whole, to a place that starts up to 15 bytes early. Row by row, and
  // padded, where they would lie in the same banks. Zero points: whole always.
  static constexpr bool SEPARATE = PAIRS && !MXK_INTERLEAVED, PAIRED = PAIRS && MXK_INTERLEAVED;
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
};

#if MXK_FORMAT
#include "decode_int4_layout.cuh"
#else
#include "decode_mxfp4_layout.cuh"
#endif

// Shared memory, in its order: slots, activations, scales, partial sums, barriers, lists.
constexpr int AT_DIGITS = STAGES * SLOT;
constexpr int AT_SCALES = AT_DIGITS + BUFFERS * DIGITS;
constexpr int AT_SUMS = AT_SCALES + SCALE_STAGES * SCALES;
constexpr int AT_BARRIERS = AT_SUMS + SUM_STAGES * SUM_SET;
constexpr int AT_FACTORS = AT_BARRIERS + BARRIERS;                  // [BUFFERS][ROWS][2] fp32
constexpr int AT_LARGEST = AT_FACTORS + FACTOR_BUFFERS * ROWS * 8;  // [BUFFERS][ROWS]
constexpr int AT_LAID = round_up(AT_LARGEST + FACTOR_BUFFERS * ROWS * 4, 16), AT_COUNTS = AT_LAID + LAID_BYTES;
constexpr int AT_OFFSETS = AT_COUNTS + round_up(4 * E, 16);
constexpr int AT_LISTS = AT_OFFSETS + round_up(4 * E, 16);
constexpr int AT_ROUTER = AT_LISTS + LIST_BYTES;  // fp32
constexpr int AT_COUNTS_OF = AT_ROUTER + ROUTER_BYTES;
constexpr int AT_END = AT_COUNTS_OF + COUNT_BYTES;
constexpr int SHARED = round_up(AT_END + 16, 128);
static_assert(STAGES >= 2 && SHARED <= SHARED_LIMIT, "shared memory of a block");

// The barriers of a block: full and empty of each ring.
constexpr int AT_SLOT_FULL = 0, AT_SLOT_EMPTY = AT_SLOT_FULL + 8 * STAGES, AT_SCALES_EMPTY = AT_SLOT_EMPTY + 8 * STAGES;
constexpr int AT_DIGITS_FULL = AT_SCALES_EMPTY + 8 * SCALE_STAGES, AT_DIGITS_EMPTY = AT_DIGITS_FULL + 8 * BUFFERS;
constexpr int AT_SUMS_FULL = AT_DIGITS_EMPTY + 8 * BUFFERS, AT_SUMS_EMPTY = AT_SUMS_FULL + 8 * SUM_STAGES;
static_assert(AT_SUMS_EMPTY + 8 * SUM_STAGES <= BARRIERS, "barriers");

extern "C" {
__device__ __constant__ extern const int decode_threads = THREADS;
__device__ __constant__ extern const int decode_shared = SHARED;
// Bytes of a row of a box of w13 and w2, and of their scales (0: no maps).
__device__ __constant__ extern const int decode_box13 = GateUp::STRIDE, decode_box2 = Down::STRIDE;
__device__ __constant__ extern const int decode_scales13 = GateUp::PADDED ? GateUp::SCALE_STRIDE : 0;
__device__ __constant__ extern const int decode_scales2 = Down::PADDED ? Down::SCALE_STRIDE : 0;
}
