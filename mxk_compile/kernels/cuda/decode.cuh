// The decode kernel's parameters: macros of the module, argument of the launch, and what follows from them (moe_decode.cu).
#pragma once
#include "call.cuh"

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
#define MXK_MAX_ROUTES 256  // multiple of 8
#endif
#ifndef MXK_WARPS
#define MXK_WARPS 4  // that split the columns of a slot
#endif
#ifndef MXK_GROUPS
#define MXK_GROUPS 2  // of such warps, which take slots in turn
#endif
#ifndef MXK_STAGES
#define MXK_STAGES 4  // slots of the ring
#endif
#ifndef MXK_TILES13
#define MXK_TILES13 1  // 16-row tiles a slot, gate and up
#endif
#ifndef MXK_TILES2
#define MXK_TILES2 1  // 16-row tiles a slot, down
#endif
#ifndef MXK_COLUMN_TILES
#define MXK_COLUMN_TILES 1  // rows of an expert taken at once, in eights
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
  const u8* x;  // bf16 [T, K], dense rows
  const u8* ids;
  const u8* router;
  u8* out;  // bf16, contiguous
  u8* h;
  u8* y;
  u32* counters;  // up to here addresses, which differ from call to call of a layer
  Operand w13, s13, b13;  // with row_step 1 and separate stacks: up rows are expert + up_expert
  Operand w2, s2, b2;
  i64 x_stride;                             // elements
  i64 ids_stride[2], router_stride[2];      // elements
  i64 experts_min;
  i32 tokens;
  i32 ids_bytes, ids_signed;                // 1, 2, 4 or 8
  i32 router_dtype, b13_dtype, b2_dtype;    // Dtype
  i32 activation;                           // Activation
  i32 gate_row, up_row, up_expert;          // not interleaved
  float alpha, limit;
};

constexpr int K = MXK_HIDDEN, I = MXK_INTER, E = MXK_EXPERTS, TOP_K = MXK_TOP_K, MAX_ROUTES = MXK_MAX_ROUTES;
constexpr int W = MXK_WARPS, GROUPS = MXK_GROUPS, NT = MXK_COLUMN_TILES, STAGES = MXK_STAGES;
constexpr int HELPERS = 4;  // warp 0 copies, 1..3 are the epilogue: a warpgroup, as register counts are set by warpgroup
constexpr int EPILOGUE = HELPERS - 1;
constexpr int CONSUMERS = GROUPS * W;
constexpr int THREADS = (CONSUMERS + HELPERS) * 32;
// Buffers between consumers and epilogue. A wait tells uses of a barrier apart by one bit, so whoever waits for a use
// must know that the use before it has ended: every buffer and slot is always the same warps' turn.
constexpr int PARTIALS = GROUPS == 2 ? 6 : 3;
constexpr int HELPER_REGISTERS = 72;
// Of what the launch gives every thread: asking for more than the helpers gave back would wait for ever.
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8 < 248 ? 65536 / THREADS / 8 * 8 : 248;
constexpr int CONSUMER_REGISTERS = (LAUNCH_REGISTERS * THREADS - HELPERS * 32 * HELPER_REGISTERS) / (CONSUMERS * 32) / 8 * 8;
constexpr int SHARED_LIMIT = 232448;  // of a block
static_assert(K % 32 == 0 && I % 32 == 0 && MAX_ROUTES % 8 == 0 && CONSUMERS % 4 == 0, "limits");
static_assert(GROUPS <= 2 && STAGES % GROUPS == 0 && PARTIALS % GROUPS == 0 && PARTIALS % EPILOGUE == 0, "turns");

__host__ __device__ constexpr int round_up(int value, int step) { return (value + step - 1) / step * step; }

// One projection: COLUMNS of the dot product, `TILES` 16-row tiles a slot, `PAIRS` if units of work are (gate, up) rows.
template <int COLUMNS, int TILES_, bool PAIRS_, int UNITS_>
struct Projection {
  static constexpr int TILES = TILES_, UNITS = UNITS_;  // UNITS of an expert
  static constexpr bool PAIRS = PAIRS_;
  static constexpr int UNITS_A_SLOT = (PAIRS ? 8 : 16) * TILES;
  static constexpr int BYTES = COLUMNS / 2, GROUPS = COLUMNS / 32;
  static constexpr int STEPS = (COLUMNS + 127) / 128;  // a step is 128 columns: a group a lane of four
  static constexpr int STEPS_A_WARP = (STEPS + W - 1) / W;
  // Slot row 2g + half is fragment row g + 8 * half where rows lie in the slot as in memory: copied in one piece. A quarter
  // warp reads 16 bytes four times of two fragment rows, two slot rows apart: 64 modulo 128 bytes, no bank twice. Other
  // lengths are copied row by row, fragment row by fragment row, to a stride that is 64 modulo 128.
  static constexpr bool WHOLE = MXK_ALIGNED && BYTES % 64 == 32 && (MXK_INTERLEAVED || !PAIRS);
  static constexpr int STRIDE = WHOLE ? BYTES : BYTES / 128 * 128 + (BYTES % 128 <= 64 ? 64 : 192);
  __device__ static constexpr int slot_row(int tile, int g, int half) { return 16 * tile + (WHOLE ? 2 * g + half : g + 8 * half); }
  // Down: the output row of a fragment row, from the slot's first.
  __device__ static constexpr int unit(int tile, int g, int half) { return PAIRS ? 8 * tile + g : slot_row(tile, g, half); }
  // Scales of half the rows of a slot; copies start and end on 16 bytes.
  static constexpr int SCALES = round_up(8 * TILES * GROUPS, 16) + 32;
  static constexpr int SLOT = round_up(16 * TILES * STRIDE + 2 * SCALES, 128);
};
using GateUp = Projection<K, MXK_TILES13, true, I>;
using Down = Projection<I, MXK_TILES2, false, K>;

constexpr int TILES = GateUp::TILES > Down::TILES ? GateUp::TILES : Down::TILES;
constexpr int SLOT = GateUp::SLOT > Down::SLOT ? GateUp::SLOT : Down::SLOT;
constexpr int PARTIAL = W * 512;                      // of 16 rows x 8 columns
constexpr int PARTIAL_SET = TILES * NT * PARTIAL;     // of a slot
constexpr int AT_PARTIALS = STAGES * SLOT;
constexpr int AT_BARRIERS = AT_PARTIALS + PARTIALS * PARTIAL_SET;
constexpr int AT_COUNTS = AT_BARRIERS + round_up(16 * (STAGES + PARTIALS), 16);
constexpr int AT_OFFSETS = AT_COUNTS + round_up(4 * E, 16);
constexpr int AT_LISTS = AT_OFFSETS + round_up(4 * E, 16);
constexpr int AT_ROUTER = AT_LISTS + 6 * 2 * MAX_ROUTES;  // fp32
constexpr int AT_END = AT_ROUTER + 4 * MAX_ROUTES;
constexpr int SHARED = round_up(AT_END + 16, 128);
static_assert(SHARED <= SHARED_LIMIT, "shared memory of a block");

extern "C" {
__device__ __constant__ extern const int decode_threads = THREADS;
__device__ __constant__ extern const int decode_shared = SHARED;
}
