// What the parts of prefill.cu share: sizes, the ring of stages, and which weight rows a tile is made of.
#pragma once
#include "formats.cuh"

constexpr int PANEL = 64;                 // columns of a panel: 128 bytes of bf16, the swizzle's span
constexpr int PANEL_BYTES = 2 * PANEL;    // of a row
#ifndef MXK_TOKENS
#define MXK_TOKENS 128
#endif
#ifndef MXK_SCALE_ALIGNMENT
#define MXK_SCALE_ALIGNMENT 1  // of rows of scales, in bytes
#endif
#ifndef MXK_PROJECT
#define MXK_PROJECT 0
#endif
// Where rows of activations lie, of a projection: in panels, or as the caller has them: rows that a list names, or the rows
// themselves, by a tensor map.
#define PANELS 0
#define LISTED 1
#define IN_PLACE 2
#ifndef MXK_ROWS
#define MXK_ROWS PANELS
#endif
constexpr bool NATURAL = MXK_ROWS != PANELS;  // the order of a panel's columns
constexpr int TOKENS = MXK_TOKENS;        // of a tile: wgmma's N, 16..176 in steps of 16
constexpr int ROWS = 256;                 // weight rows of a tile
constexpr int PACKED_BYTES = PANEL / 2;   // of a panel of one weight row
constexpr bool ROOMY = MXK_SHARED >= 200 * 1024;
// Panels of a stage: 128 bytes of a row, a line of L2, where bytes bind; 64 where activations need the room.
constexpr int SPAN = TOKENS <= 64 && ROOMY ? 4 : 2;
// Warpgroups of consumers, and units of 64 weight rows that each multiplies. With WGMMA and few tokens, four fill each
// other's waits from one deep ring, where two blocks a multiprocessor had rings of two stages.
constexpr int GROUPS = MXK_MULTIPLY == 0 && TOKENS <= 64 ? 4 : 2;
constexpr int UNITS = ROWS / 64 / GROUPS;
// Steps of 16 columns whose products are started at once: fewer waits, but more registers for fragments, which tcgen05 has, as
// its sums are not in registers.
constexpr int GROUP_STEPS = MXK_MULTIPLY == 2 ? 4 : TOKENS <= 128 ? 2 : 1;
constexpr int SPAN_BYTES = SPAN * PACKED_BYTES;
constexpr int TOKEN_BYTES = TOKENS * PANEL_BYTES;  // of one panel
constexpr int WEIGHTS = SPAN * TOKEN_BYTES;        // where they lie in a stage
// Scales of groups of 32 that fit pass through shared memory; the others are read where they are used.
constexpr bool STAGED = GROUP_LOG == 5 && SCALE_BYTES <= 2 && !MXK_ZEROS;
constexpr int SCALES = WEIGHTS + ROWS * SPAN_BYTES;
constexpr int ROW_SCALES = STAGED ? 2 * SPAN * SCALE_BYTES : 0;  // bytes of a row and stage: 4 to 16
constexpr int STAGE_BYTES = (SCALES + ROWS * ROW_SCALES + 1023) / 1024 * 1024;
// Of a multiprocessor: with few tokens and two warpgroups there are registers for a second block.
constexpr int BLOCKS = GROUPS == 2 && STAGED && TOKENS <= 32 && ROOMY ? 2 : 1;
constexpr int RING_BYTES = (MXK_SHARED - 5 * 1024) / BLOCKS - 1024;
constexpr int STAGES = RING_BYTES / STAGE_BYTES < 8 ? RING_BYTES / STAGE_BYTES : 8;
static_assert(STAGES >= 2, "shared memory of a block");
constexpr int TOKEN_WARPS = MXK_ROWS == LISTED && SPAN == 2 ? 2 : 1;  // that copy activations
constexpr int COPIERS = 32 * (3 - TOKEN_WARPS);  // threads that copy weights
constexpr int SCALERS = STAGED ? 32 : 0;  // threads that copy scales
// Tiles whose lists are in use: the producers may be a tile a stage ahead, and warpgroups at the end of one.
constexpr int LISTS = STAGES + 2;
constexpr int PRODUCERS = 128;
constexpr int CONSUMERS = GROUPS * 128;
constexpr int THREADS = PRODUCERS + CONSUMERS;
// Of a thread. setmaxnreg shares out what a block starts with: it waits for ever for more.
constexpr int START_REGISTERS = 65536 / BLOCKS / THREADS / 8 * 8;
constexpr int PRODUCER_REGISTERS = BLOCKS == 2 ? 48 : TOKENS <= 144 ? 56 : 40;
constexpr int CONSUMER_REGISTERS = (START_REGISTERS * THREADS - PRODUCER_REGISTERS * PRODUCERS) / CONSUMERS / 8 * 8;

enum Product { GATE_UP, DOWN, PROJECT };

// What `list` says of place i, and so which row of the output it is; -1 for none.
enum Listed : i32 {
  ALL,     // no list: row i
  ROUTES,  // list[i], if it is below most_listed; `share` of them read one row of the activations
  MARKED   // row i, if list[i] is below most_listed
};

struct Gemm {
#if MXK_ROWS == IN_PLACE
  TensorMap map;       // of activations: columns, rows, experts; a box: PANEL columns of TOKENS rows
#endif
  Operand weight, scale, zero, bias;
  const u8* rows;      // activations
  u8* out;             // gate_up: H in panels; down: Y [rows][outputs] fp32; project: bf16, rows out_stride apart
  const int4* tiles;   // {expert, first place, places <= TOKENS, rounded up to 16; places}
  const i32* num_tiles;
  const i32* list;     // project
  i64 out_stride;      // elements
  i32 listed, share, most_listed;
  i32 row_stride;      // listed: of activations, in 16 bytes
  i32 expert_places;   // in place: of each expert; 0: places are those of all
  i32 total_rows;      // of the panelled buffers
  i32 panels;          // of the input columns, rounded up
  i32 columns;         // K, or I
  i32 outputs;         // gate_up: I; down: K; project: N
  i32 row_step, gate_row, up_row, up_expert;  // row of output i: gate i * row_step + gate_row, up of expert + up_expert
  i32 bias_dtype, activation;
  float alpha, limit;
  i32 chained;  // whether the launch before is the same product for other tiles, which this one need not wait for
  i32 wide;     // project: whether out takes 16-byte stores
};

// What the consumers of a tile want to know at its end, from the producers.
struct List {
  int4 tile;
  i32 target[TOKENS];  // row of the output, -1 for none
#if MXK_ROWS == LISTED
  u32 source[TOKENS];  // row of the activations: where, in 16 bytes
#endif
};

using Sums = float[UNITS][TOKENS / 2];        // of a lane: its units, fragments of D
using Fragment = u32[GROUP_STEPS][UNITS][4];  // of each step and unit

// What `Products` of prefill_wgmma.cuh and prefill_mma.cuh share, whose sums are in registers. `Products` are one consumer
// thread's; a leader makes one of its warpgroup's ARRIVALS at the barrier of a stage, where all have read it.
struct RegisterSums {
  static constexpr int ARRIVALS = 4;
  struct Shared {};
  static __device__ __forceinline__ bool leads(int lane, int) { return lane == 0; }
  static __device__ __forceinline__ void prepare(Shared&) {}
  __device__ __forceinline__ void begin(Sums& sum) {
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
#pragma unroll
      for (int i = 0; i < TOKENS / 2; ++i) sum[unit][i] = 0.0f;
    }
  }
  __device__ __forceinline__ void end() {}
};

// Scales of one panel of a lane's weight rows: its units, and rows g and g + 8 (gate and up) of a fragment.
// In their natural order, a lane's columns of a panel are of two groups of 32.
constexpr int SCALE_PARTS = NATURAL && GROUP_LOG == 5 ? 2 : 1;
struct Scales {
  Scale of[SCALE_PARTS][UNITS][2];
};

struct ScaleRows {  // where the lane reads those that are not staged
  const u8* first[2];
  const u8* zeros[2];
  i32 unit, zero_unit;  // from the first unit's to the second's, bytes
  i32 columns[UNITS];   // of a unit, none for a row beyond the matrix

  __device__ __forceinline__ void load(Scales& scales, int panel, int quarter) const {
    if constexpr (STAGED) return;
#pragma unroll
    for (int part = 0; part < SCALE_PARTS; ++part) {
      const int column = PANEL * panel + (NATURAL ? 32 * part : 16 * quarter);
#pragma unroll
      for (int u = 0; u < UNITS; ++u) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          scales.of[part][u][half] = load_scale(first[half] + u * unit, zeros[half] + u * zero_unit,
                                                GROUP_LOG == 31 ? 0 : column >> GROUP_LOG, column < columns[u]);
      }
    }
  }
};

struct Ring {
  u32 data, full, empty;  // shared addresses
  u32 stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ void skip(u32 count) {
    stage += count;
    parity ^= stage / STAGES & 1;
    stage %= STAGES;
  }
  __device__ __forceinline__ u32 here() const { return data + stage * STAGE_BYTES; }
  __device__ __forceinline__ u32 filled() const { return full + 8 * stage; }
  __device__ __forceinline__ u32 emptied() const { return empty + 8 * stage; }
};

// A stage's pieces of a row, one a panel, are turned so that eight rows at once hit no bank twice.
__device__ __forceinline__ u32 turn_of(int slot) { return SPAN == 4 ? slot % 4 : slot / 2 % 2; }

// Where a lane reads in a stage, and what of it is the lane's.
struct Lane {
  u32 weights, scales, of_quarter;
  __device__ __forceinline__ Lane(int slot, int quarter) {
    weights = WEIGHTS + slot * SPAN_BYTES + turn_of(slot) * PACKED_BYTES + (NATURAL ? 0 : 8 * quarter);
    scales = SCALES + slot * ROW_SCALES;
    of_quarter = NATURAL ? quarter | (4 + quarter) << 4 : selector_of(quarter / 2);
    asm volatile("" : "+r"(weights), "+r"(scales), "+r"(of_quarter));  // else the compiler computes them anew each time
  }
  static constexpr __device__ u32 selector_of(int group) {
    return group == 0 ? IS_MXFP4 ? 0x4440 : 0x1010 : IS_MXFP4 ? 0x4441 : 0x3232;
  }
  // For __byte_perm, of the scales of a panel's two groups.
  __device__ __forceinline__ u32 selector(int part) const { return NATURAL ? selector_of(part) : of_quarter; }
  // The lane's 16 codes of a panel: a quarter of a row's, or byte `quarter` of each word.
  __device__ __forceinline__ void load(u32 (&codes)[2], u32 address) const {
    if constexpr (NATURAL) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 words = load_shared_16(address + 16 * i);
        codes[i] = __byte_perm(__byte_perm(words.x, words.y, of_quarter), __byte_perm(words.z, words.w, of_quarter), 0x5410);
      }
    } else {
      const uint2 words = load_shared_8(address);
      codes[0] = words.x, codes[1] = words.y;
    }
  }
};

// Which weight rows a fragment's rows g and g + 8 (half 0 and 1) of a warp in `unit` are.
//   gate_up   of a panel of 64 outputs those whose permuted places are neighbours (see above); halves are gate and up
//   down      16 neighbouring rows a fragment
//   project   so that a lane of four ends up with 8 neighbouring outputs of a token: 16 bytes
template <Product PRODUCT>
struct Tile {
  static constexpr int OUTPUTS = PRODUCT == GATE_UP ? ROWS / 2 : ROWS;
  static constexpr int GROUP = OUTPUTS / 2;  // of two units
  static constexpr int UNIT = PRODUCT == GATE_UP ? 8 : PRODUCT == DOWN || UNITS == 1 ? 64 : 4;
  static constexpr int WARP = PRODUCT == GATE_UP ? 1 : PRODUCT == DOWN ? 16 : 16 * UNITS;
  static constexpr int HALF = PRODUCT == DOWN ? 8 : 2;

  __device__ static int rows_of(const Gemm& p) { return (p.outputs + OUTPUTS - 1) / OUTPUTS; }
  // From the output of row g in the first warp, unit and group.
  __device__ static constexpr int distance(int group, int unit, int warp) {
    return GROUP * group + UNIT * unit + WARP * warp;
  }
  __device__ static int first_output(int row_tile, int g) {
    return row_tile * OUTPUTS +
           (PRODUCT == GATE_UP ? 16 * (g / 2) + 4 * (g % 2) : PRODUCT == DOWN ? g : 4 * UNITS * (g / 2) + g % 2);
  }
  __device__ static i64 row(const Gemm& p, int output, int half) {
    if (PRODUCT != GATE_UP) return output + HALF * half;
    return static_cast<i64>(output) * p.row_step + (half ? p.up_row : p.gate_row);
  }
  __device__ static int expert(const Gemm& p, int expert, int half) {
    return PRODUCT == GATE_UP && half ? expert + p.up_expert : expert;
  }
  __device__ static int row_step(const Gemm& p) { return PRODUCT == GATE_UP ? p.row_step : 1; }
};
